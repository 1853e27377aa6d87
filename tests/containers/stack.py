"""`docker compose` on this project's files, as a person types it, with name, port and settings of a test's own."""

import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.end_to_end.pair import Pair, Service, free_port
from tests.end_to_end.processes import wait_until

ROOT = Path(__file__).parents[2]
BUILT = Path(__file__).with_name("compose.ci.yaml")
CLEAR_LINE = re.compile("\x1b\\[2K")
"""Compose writes it before every line, whoever reads."""
READY_S = 240.0
"""Two services that load torch one after the other, on a busy machine of two cores."""


def docker(*arguments: str, timeout_s: float = 120.0) -> str:
    """What the command prints; `AssertionError` with its errors when it fails."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr[-2000:]}"
    return done.stdout


@dataclass
class Stack:
    """One compose project."""

    name: str
    port: int
    variables: Mapping[str, str] = field(default_factory=dict)
    overlays: tuple[Path, ...] = ()

    @property
    def url(self) -> str:
        """The public port."""
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *arguments: str, timeout_s: float = READY_S) -> subprocess.CompletedProcess[str]:
        """`docker compose ARGUMENTS`, whatever comes of it."""
        files = [part for path in (ROOT / "compose.yaml", BUILT, *self.overlays) for part in ("-f", str(path))]
        command = ["docker", "compose", "-p", self.name, "--project-directory", str(ROOT), *files, *arguments]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("H3_", "HF_", "COMPOSE_"))}
        environment = {**kept, "H3_PUBLISH": f"127.0.0.1:{self.port}", **self.variables}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def done(self, *arguments: str, timeout_s: float = READY_S) -> str:
        """As `compose`, and it has to succeed."""
        run = self.compose(*arguments, timeout_s=timeout_s)
        assert run.returncode == 0, f"{' '.join(arguments)}: {run.stderr[-2000:]}\n{self.logs()}"
        return run.stdout

    def up(self) -> None:
        """Everything, until it is healthy; images are there already."""
        self.done("up", "--no-build", "--wait")

    def down(self) -> None:
        """Everything, with the volumes."""
        self.done("down", "--volumes", "--timeout", "60")

    def logs(self, *services: str) -> str:
        """What a person sees with `docker compose logs`."""
        shown = self.compose("logs", "--no-log-prefix", "--no-color", *services).stdout
        return CLEAR_LINE.sub("", shown)[-8000:]

    def inspect(self, service: str) -> dict[str, object]:
        """The container of a service, running or not."""
        container = self.done("ps", "--all", "--quiet", service).split()[0]
        return dict(json.loads(docker("inspect", container))[0])

    def state(self, service: str) -> dict[str, object]:
        """`State` of the container."""
        state = self.inspect(service)["State"]
        assert isinstance(state, dict)
        return state

    def inside(self, service: str, script: str) -> str:
        """What a shell in the running container prints."""
        return self.done("exec", "--no-TTY", service, "sh", "-c", script)

    def kill(self, service: str) -> None:
        """KILL the service's API process from within, as a fault would; the engine starts the container again."""
        before = self.state(service)["StartedAt"]
        self.compose("exec", "--no-TTY", service, "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)")
        wait_until(lambda: self.state(service)["StartedAt"] != before, 60, f"{service} started anew", every_s=0.5)

    def ready(self) -> bool:
        """Whether the public port says so."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        """Until both services can work."""
        try:
            wait_until(self.ready, READY_S, "ready", every_s=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def left(self) -> list[str]:
        """Containers, volumes and networks of this project that are there."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("ps", "--all", "--format", "{{.Names}}"), ("volume", "ls", "--quiet"), ("network", "ls", "--quiet"))
        return [name for kind in kinds for name in docker(*kind, "--filter", label).split()]


@contextmanager
def running(variables: Mapping[str, str] | None = None, *overlays: str) -> Iterator[Stack]:
    """A stack of its own under those overlays, healthy inside; afterwards nothing of it may be left."""
    files = tuple(ROOT / "docker" / f"compose.{name}.yaml" for name in overlays)
    stack = Stack(f"h3-{uuid.uuid4().hex[:8]}", free_port(), variables or {}, files)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
    assert stack.left() == []


@contextmanager
def from_outside(stack: Stack, root: Path) -> Iterator[Pair]:
    """The stack as the tests of two processes know a pair, by its public port alone."""
    encoder, diffusion = (
        Service(f"{name}_service", [], port, root / f"{name}.log", {})
        for name, port in (("encoder", 0), ("diffusion", stack.port))
    )
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        yield Pair(root, root, stack.name, encoder, diffusion, client)


def wait_exit(stack: Stack, service: str, timeout_s: float = 120.0) -> int:
    """The exit code once the container has ended."""
    deadline = time.monotonic() + timeout_s
    while (state := stack.state(service))["Status"] != "exited":
        assert time.monotonic() < deadline, f"{service} runs on: {stack.logs(service)}"
        time.sleep(0.5)
    return int(str(state["ExitCode"]))
