"""Two live services as a test sees them: started by command, watched, stopped, searched for leftovers."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

from shared_schema.videos import FINAL
from tests.end_to_end import processes
from tests.end_to_end.clips import FilePart, form
from video_client.pair import free_ports

START_S = 240.0
"""Loading torch in two processes on a busy machine of two cores."""
STOP_S = 45.0
"""The drain time of 30 s and some."""
GONE_S = 10.0
"""Within this no process of a dead service may be left."""
Digest = tuple[object, object]
"""Of frames and sound."""


@dataclass
class Service:
    """One of the two services: its command, and the process that runs it while it runs."""

    package: str
    arguments: list[str]
    port: int
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the API process."""
        assert self.process is not None, f"{self.package} is not running"
        return self.process.pid

    def start(self) -> None:
        """Run the command; returns at once."""
        command = [sys.executable, "-m", *self.package.split(), *self.arguments, "--port", str(self.port)]
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def ready(self) -> bool:
        """Whether `/readyz` says so. `AssertionError` when the process has ended instead."""
        assert self.process is not None
        code = self.process.poll()
        assert code is None, f"{self.package} ended with {code} before it was ready"
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def was_ready(self) -> bool:
        """Whether it has said so since its last start."""
        _, _, since = self.log.read_text(errors="replace").rpartition("\n$ ")
        return " ready at http" in since

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until `/readyz` is 200."""
        try:
            processes.wait_until(self.ready, timeout_s, f"{self.package} ready", every_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.reasons()}\n{self.tail()}") from None

    def reasons(self) -> str:
        """What `/readyz` says at present, for messages."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).text
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"

    def rank_pids(self) -> list[int]:
        """Of the ranks, as `/health` lists them."""
        health = httpx.get(f"{self.url}/health", timeout=5).json()
        return [rank["pid"] for rank in health["ranks"] if rank["pid"]]

    def signal(self, number: signal.Signals) -> None:
        """To the API process alone."""
        os.kill(self.pid, number)

    def stop(self, timeout_s: float = STOP_S) -> int:
        """TERM, and the exit code once the API process has ended."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """KILL the API process, and reap it."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- {self.log.name} ---\n" + "\n".join(text.splitlines()[-lines:])


@dataclass
class Pair:
    """The encoder and the diffusion service, and the folders they may write to."""

    root: Path
    slabs: Path
    mark: str
    encoder: Service
    diffusion: Service
    client: httpx.Client = field(repr=False)

    @property
    def state(self) -> Path:
        """State folder of the diffusion service."""
        return self.root / "state"

    @property
    def scratch(self) -> Path:
        """What both services see as the folder for temporary files."""
        return self.root / "scratch"

    def start(self) -> None:
        """Both at once, as a deployment would; returns when the pair can serve."""
        self.encoder.start()
        self.diffusion.start()
        self.wait_ready()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until both are ready; at once with an error when one of them ends."""
        try:
            processes.wait_until(self.ready, timeout_s, "both services ready", every_s=0.1)
        except AssertionError as error:
            reasons = f"{self.encoder.reasons()}\n{self.diffusion.reasons()}"
            raise AssertionError(f"{error}\n{reasons}\n{self.tails()}") from None

    def ready(self) -> bool:
        """Whether both are."""
        encoder, diffusion = self.encoder.ready(), self.diffusion.ready()
        return encoder and diffusion

    def post(self, fields: Mapping[str, str], parts: Iterable[FilePart] = ()) -> httpx.Response:
        """`POST /v1/videos` as a multipart form, whatever the answer."""
        return self.client.post("/v1/videos", files=form(fields, parts))

    def submit(self, fields: Mapping[str, str], parts: Iterable[FilePart] = ()) -> str:
        """The id of a job that was accepted."""
        answer = self.post(fields, parts)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def video(self, job: str) -> dict[str, object]:
        """The job as it is now."""
        answer = self.client.get(f"/v1/videos/{job}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait_final(self, job: str, timeout_s: float = 120.0) -> dict[str, object]:
        """The job once it is completed, failed or cancelled."""
        deadline = time.monotonic() + timeout_s
        while (video := self.video(job))["status"] not in FINAL:
            assert time.monotonic() < deadline, f"job is not final after {timeout_s:g} s: {video}\n{self.tails()}"
            time.sleep(0.05)
        return video

    def completed(self, job: str, timeout_s: float = 120.0) -> dict[str, object]:
        """The job once it is completed; `AssertionError` with both logs when it ends otherwise."""
        video = self.wait_final(job, timeout_s)
        assert video["status"] == "completed", f"{video}\n{self.tails()}"
        return video

    def wait_phase(self, job: str, phase: str, timeout_s: float = 60.0) -> None:
        """Until the job is in `phase`; `AssertionError` when it ended before."""
        deadline = time.monotonic() + timeout_s
        while (video := self.video(job))["phase"] != phase:
            assert video["status"] not in FINAL, f"job ended before phase {phase}: {video}"
            assert time.monotonic() < deadline, f"job never reached phase {phase}: {video}"
            time.sleep(0.002)

    def job_count(self) -> int:
        """How many jobs the service knows."""
        return len(listed(self.client))

    def tails(self) -> str:
        """The end of both logs."""
        return f"{self.encoder.tail()}\n{self.diffusion.tail()}"

    def leftovers(self) -> list[str]:
        """What a stopped pair has left: processes, slabs, inputs, parts, temporary files, ports."""
        found = [f"process {pid}: {processes.command_line(pid)}" for pid in processes.marked(self.mark)]
        found += [f"slab {path}" for path in self.slabs.rglob("*") if path.is_file()]
        found += [f"temporary {path}" for path in self.temporary_files()]
        found += self.unfinished_files()
        found += [f"port {each.port} is taken" for each in (self.encoder, self.diffusion) if listens(each.port)]
        return found

    def temporary_files(self) -> list[Path]:
        """What lies in the folder for temporary files; torch's own cache folder belongs to the machine."""
        return [path for path in self.scratch.iterdir() if not path.name.startswith("torchinductor")]

    def unfinished_files(self) -> list[str]:
        """Files in the state folder that are neither the database nor a clip."""
        kept = re.compile(r"jobs\.sqlite3(-wal|-shm)?|lock|video_[0-9a-f]{32}(_\d+)?\.mp4")
        files = [path for path in self.state.rglob("*") if path.is_file()]
        return [f"file {path}" for path in files if not kept.fullmatch(path.name)]

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Both are ready inside; afterwards they end in order, and nothing of them may be left."""
        try:
            self.start()
            yield self
        finally:
            wrong = self.close()
            shutil.rmtree(self.slabs)
        assert not wrong, "\n".join([*wrong, self.tails()])

    def close(self) -> list[str]:
        """Stop what runs, by TERM; what was wrong about it. Nothing of the pair is left afterwards."""
        wrong = []
        for service in (self.diffusion, self.encoder):
            if service.process is not None and service.process.poll() is None:
                wrong += stopped_wrongly(service)
        deadline = time.monotonic() + GONE_S
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        processes.end(processes.marked(self.mark))
        self.client.close()
        return wrong + left


def make_pair(
    root: Path,
    model: str,
    service: Mapping[str, object] | None = None,
    *,
    base: str = "tiny",
    program: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Pair:
    """A pair that is not started: free ports, folders of its own, the preset `base` with `service` over it.

    `program` is a module that runs as either service, named by its first argument, in place of the services' own.
    """
    mark = uuid.uuid4().hex
    slabs = Path(tempfile.mkdtemp(prefix="h3-test-", dir="/dev/shm"))
    (root / "scratch").mkdir()
    deploy = root / "pair.yaml"
    deploy.write_text(_deploy_file(base, {"slab_folder": str(slabs), **(service or {})}))
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("H3_")},
        processes.MARK: mark,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(root / "scratch"),
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    shared = ["--model", model, "--deploy-config", str(deploy)]
    programs = (
        ("encoder_service", "diffusion_service") if program is None else (f"{program} encoder", f"{program} diffusion")
    )
    encoder = Service(programs[0], shared, free_port(), root / "encoder.log", variables)
    arguments = [*shared, "--encoder-url", encoder.url, "--state-dir", str(root / "state")]
    diffusion = Service(programs[1], arguments, free_port(), root / "diffusion.log", variables)
    return Pair(root, slabs, mark, encoder, diffusion, httpx.Client(base_url=diffusion.url, timeout=120))


def nixl_over(root: Path, base: str, extra: str = "{host: auto, zmq_port: 50071, backends: [UCX]}") -> str:
    """Write a deploy file into `root` that is the preset `base` with NIXL between the stages; its name."""
    name = f"{base}_nixl.yaml"
    edges = (
        "[{stage_id: 0, output_connectors: {to_stage_1: nixl}}, {stage_id: 1, input_connectors: {from_stage_0: nixl}}]"
    )
    connector = f"connectors: {{nixl: {{name: NixlConnector, extra: {extra}}}}}"
    (root / name).write_text(f"base_config: {base}\n{connector}\nstages: {edges}\n")
    return name


def listed(client: httpx.Client) -> dict[str, dict[str, object]]:
    """Every job that a service knows, by id, page after page, oldest first."""
    found: dict[str, dict[str, object]] = {}
    after: str | None = None
    while True:
        query = {"limit": "100", "order": "asc", **({"after": after} if after else {})}
        page = client.get("/v1/videos", params=query).raise_for_status().json()
        for video in page["data"]:
            assert video["id"] not in found, f"{video['id']} is listed twice"
            found[video["id"]] = video
        if not page["has_more"]:
            return found
        after = page["last_id"]


def free_port() -> int:
    """A port of the loopback address that nobody listens on, and that no connection gets meanwhile."""
    return free_ports(1)[0]


def _deploy_file(base: str, service: Mapping[str, object]) -> str:
    lines = [f"  {key}: {value}" for key, value in service.items()]
    return "\n".join([f"base_config: {base}", "service:", *lines, ""])


def stopped_wrongly(service: Service) -> list[str]:
    """Stop it by TERM; what was wrong about that."""
    try:
        code = service.stop()
    except subprocess.TimeoutExpired:
        service.kill()
        return [f"{service.package} did not end within {STOP_S:g} s of TERM"]
    return [] if code == 0 else [f"{service.package} ended with {code} on TERM"]


def digest_of(video: Mapping[str, object]) -> Digest:
    """What equal clips share."""
    return video["frames_sha256"], video["audio_sha256"]


def listens(port: int) -> bool:
    """Whether somebody does, on this machine."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
