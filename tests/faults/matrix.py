"""The pair on several ranks with gates, and the faults that the matrix combines."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end import processes
from tests.end_to_end.pair import Pair, Service

GATES = "FAULT_GATES"
"""Environment variable with the folder of the gates."""
PHASES = ("idle", "encoding", "encoded", "pushing", "denoising", "decoding")
PROCESSES = ("encoder-tp0", "encoder-tp1", "encoder-api", "diffusion-u0", "diffusion-u1", "diffusion-api")
SIGNALS = ("KILL", "STOP")
STATED_S = 60.0
"""From a fault to a final job: detection within 3 s limits, a restart, and the job itself, on a busy machine."""


@dataclass(frozen=True)
class Fault:
    """One signal to one process in one phase."""

    phase: str
    process: str
    signal: str

    def __str__(self) -> str:
        return f"{self.signal}-{self.process}-{self.phase}"

    @property
    def api(self) -> bool:
        """Whether it strikes an API process, not a rank."""
        return self.process.endswith("-api")

    @property
    def costs_an_attempt(self) -> bool:
        """Whether the job loses who works on it, or who keeps it; an API process that is stopped goes on."""
        at_it = ("diffusion",) if self.phase in ("denoising", "decoding") else ("encoder", "diffusion-api")
        return self.phase != "idle" and self.process.startswith(at_it) and not (self.api and self.signal == "STOP")


def in_ci() -> list[Fault]:
    """Each process and signal in one phase, each phase for one process."""
    busy = {"encoder": "encoding", "diffusion": "denoising"}
    crossed = [Fault(busy[process.split("-")[0]], process, sign) for process in PROCESSES for sign in SIGNALS]
    return crossed + [Fault(phase, _worker_of(phase), "KILL") for phase in PHASES if phase not in busy.values()]


def whole() -> list[Fault]:
    """Everything with everything."""
    return [Fault(phase, process, sign) for phase in PHASES for process in PROCESSES for sign in SIGNALS]


def _worker_of(phase: str) -> str:
    return "encoder-tp0" if phase in ("encoded", "pushing") else "diffusion-u1"


class Gates:
    """The folder through which the ranks of `tests.faults.held` are held."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def held(self, phase: str) -> Iterator[None]:
        """Ranks that come to `phase` wait there until the end of the block."""
        self.clear()
        (self.folder / phase).touch()
        try:
            yield
        finally:
            self.clear()

    def arm(self, phase: str, what: str, rank: int) -> None:
        """Have `rank` raise, run out of memory or spin in `phase`."""
        self.clear()
        (self.folder / f"{phase}.{what}-{rank}").touch()

    def wait(self, phase: str, timeout_s: float = 60.0) -> None:
        """Until a rank has come to `phase`."""
        processes.wait_until(
            lambda: any(self.folder.glob(f"{phase}.reached-*")), timeout_s, f"a rank has come to {phase}"
        )

    def clear(self) -> None:
        """Let everybody go on."""
        for file in self.folder.iterdir():
            file.unlink(missing_ok=True)


def service_of(pair: Pair, process: str) -> Service:
    """The service that a process belongs to."""
    return pair.encoder if process.startswith("encoder") else pair.diffusion


def pid_of(pair: Pair, process: str) -> int:
    """Of a rank by its name in `ps`, or of an API process."""
    service = service_of(pair, process)
    if process.endswith("-api"):
        return service.pid
    (pid,) = [pid for pid in service.rank_pids() if Path(f"/proc/{pid}/comm").read_text().strip() == process]
    return pid


def strike(pair: Pair, fault: Fault) -> None:
    """Do it; a stopped API process goes on after longer than any limit, a killed one is started again."""
    pid = pid_of(pair, fault.process)
    os.kill(pid, getattr(signal, f"SIG{fault.signal}"))
    if not fault.api:
        return
    service = service_of(pair, fault.process)
    if fault.signal == "STOP":
        time.sleep(5)
        os.kill(pid, signal.SIGCONT)
        return
    assert service.process is not None
    service.process.wait(10)
    service.start()
