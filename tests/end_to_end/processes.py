"""Looking at processes through /proc: who belongs to a pair, also after its parent died, and how much memory it has."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MARK = "PAIR_UNDER_TEST"
"""Environment variable that every process of a pair inherits: it finds orphans, which have no parent to ask."""
_LISTEN = "0A"
"""State of a socket in /proc/net/tcp."""


def marked(mark: str) -> set[int]:
    """Process ids that carry `mark`, zombies left out."""
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in _all_pids() if wanted in _environment(pid) and is_alive(pid)}


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    state = _status(pid).get("State", "Z")
    return not state.startswith(("Z", "X"))


def resident_mib(pid: int) -> float:
    """Resident memory that is the process' own, not pages of shared files."""
    return int(_status(pid).get("RssAnon", "0 kB").split()[0]) / 1024


def peak_mib(pid: int) -> float:
    """Highest resident memory so far, everything counted, since start or the last `forget_peak`."""
    return int(_status(pid).get("VmHWM", "0 kB").split()[0]) / 1024


def forget_peak(pid: int) -> float:
    """Make `peak_mib` begin anew, and say where it begins."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_mib(pid)


def cpu_s(pid: int) -> float:
    """What all its threads have computed so far, which does not depend on what else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> str:
    """For messages: what the process was started as."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def end(pids: Iterable[int]) -> None:
    """Kill these processes; those that are gone are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    """Stop these processes meanwhile: what is answered inside needed none of them."""
    stopped = list(pids)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_until(condition: Callable[[], T], timeout_s: float, what: str, every_s: float = 0.05) -> T:
    """The first true value of `condition`; `AssertionError` saying `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)
    return value


def listening(pids: Iterable[int]) -> set[str]:
    """Addresses, as hexadecimal digits, on which any of the processes listens for TCP."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            sockets |= {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == _LISTEN and f"socket:[{row[9]}]" in sockets}


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
