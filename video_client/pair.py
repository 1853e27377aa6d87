"""Both services as child processes of one parent: for `make demo`, and in the foreground for `make serve`."""

import argparse
import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

from video_client.client import VideoClient

HOST = "127.0.0.1"
HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel gives to connections."""
FIRST_PORT = 10_000
POLL_SECONDS = 0.2
STOP_SECONDS = 40.0
"""The services' drain time of 30 s and some; whoever is left is killed."""
TAIL_LINES = 40


class ServiceEnded(Exception):
    """A service ended by itself, or was not ready in time. `str(error)` says which and why."""


@dataclass(frozen=True)
class PairSettings:
    """What the two command lines are made from."""

    model: str
    deploy_config: str
    encoder_port: int
    diffusion_port: int
    state_dir: Path
    overrides: str | None = None
    lora: str | None = None
    task: str | None = None
    log_dir: Path | None = None
    """Where each service's output goes; None: the parent's own."""

    @property
    def encoder_url(self) -> str:
        """Where the encoder listens."""
        return f"http://{HOST}:{self.encoder_port}"

    @property
    def diffusion_url(self) -> str:
        """Where the public API listens."""
        return f"http://{HOST}:{self.diffusion_port}"

    def command(self, package: str) -> list[str]:
        """The command line of one service."""
        shared = ["--model", self.model, "--deploy-config", self.deploy_config]
        if self.overrides:
            shared += ["--stage-overrides", self.overrides]
        if package == "encoder_service":
            return [sys.executable, "-m", package, *shared, "--port", str(self.encoder_port)]
        own = [
            "--port",
            str(self.diffusion_port),
            "--encoder-url",
            self.encoder_url,
            "--state-dir",
            str(self.state_dir),
        ]
        for flag, value in (("--lora-path", self.lora), ("--task-type", self.task)):
            own += [flag, value] if value else []
        return [sys.executable, "-m", package, *shared, *own]


@dataclass
class Pair:
    """The two services while they run. Leaving the context stops both."""

    settings: PairSettings
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as unless_both_run:
            unless_both_run.callback(self.stop)
            for package in ("encoder_service", "diffusion_service"):
                self._running[package] = self._start(package)
            unless_both_run.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float) -> None:
        """Until the public API is ready, which needs the encoder.

        Raises:
            ServiceEnded: a service ended, or the time is over.
        """
        end = time.monotonic() + timeout_s
        with VideoClient(self.settings.diffusion_url, timeout_s=5) as client:
            while reason := client.ready():
                self.check()
                if time.monotonic() > end:
                    raise ServiceEnded(f"not ready after {timeout_s:g} s: {reason}")
                time.sleep(POLL_SECONDS)

    def pid(self, package: str) -> int:
        """Of the API process of a service."""
        return self._running[package].pid

    def check(self) -> None:
        """Raises `ServiceEnded` when a service has ended by itself."""
        for package, process in self._running.items():
            if (code := process.poll()) is not None:
                raise ServiceEnded(f"{package} ended with exit code {code}")

    def stop(self) -> None:
        """TERM diffusion, which may still need the encoder for what it drains, then the encoder; kill what is left."""
        for process in reversed(self._running.values()):
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def tails(self) -> str:
        """The last lines of both logs."""
        return "\n".join(self._tail(package) for package in self._running)

    def _start(self, package: str) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches the parent alone, which then stops both in order.
        command = self.settings.command(package)
        with self._log(package) as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _log(self, package: str) -> IO[bytes]:
        if self.settings.log_dir is None:
            return open(sys.stderr.fileno(), "wb", closefd=False)
        self.settings.log_dir.mkdir(parents=True, exist_ok=True)
        return (self.settings.log_dir / f"{package}.log").open("wb")

    def _tail(self, package: str) -> str:
        if self.settings.log_dir is None:
            return ""
        path = self.settings.log_dir / f"{package}.log"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- the end of {path}", *lines])


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on, all different.

    Below those that the kernel hands out, unless those begin low: a connection could get one of them before the
    service that is to have it.
    """
    handed_out = int(HANDED_OUT.read_text().split()[0])
    last = handed_out if handed_out > 2 * FIRST_PORT else 65_536
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST_PORT, last), 1000):
        if len(ports) == count:
            return ports
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            ports.append(port)
    raise ServiceEnded(f"hardly any port from {FIRST_PORT} to {last} of {HOST} is free")


def end_on_term() -> None:
    """Let TERM end this process as Ctrl-C does, so that it stops the pairs that it runs."""
    signal.signal(signal.SIGTERM, _interrupt)


def serve(settings: PairSettings) -> int:
    """Run the pair until Ctrl-C or TERM, or until one service ends. The exit code."""
    end_on_term()
    with Pair(settings) as pair:
        try:
            while True:
                pair.check()
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            print("stopping both services", file=sys.stderr)
            return 0
        except ServiceEnded as error:
            print(f"serve: {error}; stopping the other", file=sys.stderr)
            return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """`make serve`: encoder on 8001, diffusion on 8000."""
    parser = argparse.ArgumentParser(prog="video_client.pair", description="Run both services until Ctrl-C.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--deploy-config", default="tiny")
    parser.add_argument("--stage-overrides")
    parser.add_argument("--lora-path")
    parser.add_argument("--task-type")
    parser.add_argument("--encoder-port", type=int, default=8001)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--state-dir", type=Path, default=Path("state"))
    options = parser.parse_args(arguments)
    return serve(
        PairSettings(
            model=options.model,
            deploy_config=options.deploy_config,
            encoder_port=options.encoder_port,
            diffusion_port=options.port,
            state_dir=options.state_dir,
            overrides=options.stage_overrides,
            lora=options.lora_path,
            task=options.task_type,
        )
    )


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
