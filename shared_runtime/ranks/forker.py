"""A small process that has only imported, and forks ranks: a start in 0.03 s where imports take 10.

Runs as `python -m shared_runtime.ranks.forker FD ENTRY`. Unlike `multiprocessing`'s fork server it listens nowhere and
leaves no file behind: one inherited socket pair carries the requests, and its end of file ends everything. Ranks die
with this process (`PR_SET_PDEATHSIG`), also stopped ones, and this process dies with its parent.
"""

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

from shared_runtime.ranks.messages import Exited, Imported, KillRank, Made, MakeRank, ToMaker

_PR_SET_PDEATHSIG = 1
_MAX_REQUEST = 1 << 20


def main(descriptor: int, entry: str) -> None:
    """Import `entry` (`module:function`), then fork a rank for every request until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    die_with_parent()
    # Asked by libraries while they are imported: through the driver's management library it does not begin CUDA, which
    # no child of a fork could use any more.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    module, _, function = entry.partition(":")
    rank_main = getattr(importlib.import_module(module), function)
    gc.collect()
    gc.freeze()
    # BLAS libraries have begun threads by now; they restart them in a child by handlers of their own.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    wakeup_reader, wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control.send(pickle.dumps(Imported()))
    ranks: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([control.fileno(), wakeup_reader], [], [])
        if wakeup_reader in readable:
            os.read(wakeup_reader, 4096)
            _tell_exits(control, ranks)
        if control.fileno() in readable:
            _obey(control, ranks, rank_main)


def _obey(control: socket.socket, ranks: dict[int, int], rank_main: object) -> None:
    """Do one request; `ranks` are the living ones by pid."""
    data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST, 1)
    if not data:
        os._exit(0)
    request: ToMaker = pickle.loads(data)
    match request:
        case MakeRank():
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                control.close()
                _become_rank(request, descriptors[0], rank_main)
            os.close(descriptors[0])
            ranks[pid] = request.spec.rank
            control.send(pickle.dumps(Made(request.spec.rank, pid)))
        case KillRank(rank):
            # Only this process reaps them, so that none of these numbers can have become somebody else's.
            for pid in (pid for pid, each in ranks.items() if each == rank):
                os.kill(pid, signal.SIGKILL)


def _tell_exits(control: socket.socket, ranks: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        control.send(pickle.dumps(Exited(ranks.pop(pid), os.waitstatus_to_exitcode(status))))


def _become_rank(request: MakeRank, descriptor: int, rank_main: object) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    if request.spec.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = request.spec.visible
    Path("/proc/self/comm").write_text(request.spec.name[:15])
    assert callable(rank_main)
    code = 1
    try:
        rank_main(request.spec, request.settings, socket.socket(fileno=descriptor))
        code = 0
    except BaseException:  # os._exit below would leave without a word
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    """Ask the kernel to kill this process with the one that made it, even while it is stopped."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
