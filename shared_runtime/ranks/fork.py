"""The API process' handle on its forker: ask for ranks, hear of exits."""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Self

from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import Exited, Forked, ForkRequest, Imported
from shared_schema.errors import RankDied

OnExit = Callable[[int, int], None]
"""Called with pid and exit code; negative codes are signals."""


class ForkerHandle:
    """One forker process. It must be started from the main thread, whose end ends the forker."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, on_exit: OnExit) -> None:
        self._process = process
        self._control = control
        self._on_exit = on_exit
        self._imported = asyncio.get_running_loop().create_future()
        self._forked: dict[int, asyncio.Future[int]] = {}
        self._pids: set[int] = set()
        self.alive = True
        asyncio.get_running_loop().add_reader(control.fileno(), self._hear)

    @classmethod
    async def start(cls, entry: str, on_exit: OnExit) -> Self:
        """Start the process and wait until it has imported `entry` (`module:function`).

        Raises:
            RankDied: the imports failed; what they said is on stderr.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "shared_runtime.ranks.forker", str(theirs.fileno()), entry]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        ours.setblocking(False)
        handle = cls(process, ours, on_exit)
        await handle._imported
        return handle

    async def fork(self, spec: RankSpec, settings: object) -> tuple[int, socket.socket]:
        """A new rank: its pid and our end of its pipe.

        Raises:
            RankDied: the forker is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            future = self._forked[spec.rank] = asyncio.get_running_loop().create_future()
            try:
                socket.send_fds(self._control, [pickle.dumps(ForkRequest(spec, settings))], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RankDied(f"the forker is gone: {error}") from error
            pid = await future
        ours.setblocking(False)
        return pid, ours

    def _hear(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        match pickle.loads(data):
            case Imported():
                self._imported.set_result(None)
            case Forked(rank, pid):
                self._pids.add(pid)
                self._forked.pop(rank).set_result(pid)
            case Exited(pid, code):
                self._pids.discard(pid)
                self._on_exit(pid, code)

    def _lost(self) -> None:
        """The forker died, and the kernel killed its ranks with it."""
        self.alive = False
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        for future in [self._imported, *self._forked.values()]:
            if not future.done():
                future.set_exception(RankDied("the process that forks ranks is gone"))
        for pid in self._pids:
            self._on_exit(pid, -9)
        self._pids.clear()

    async def close(self) -> None:
        """End the forker; ranks that still live are killed with it."""
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
        self._process.kill()
        while self._process.poll() is None:
            await asyncio.sleep(0.01)

    @property
    def pid(self) -> int:
        """The forker's process id."""
        return self._process.pid

    def __repr__(self) -> str:
        return f"ForkerHandle(pid={self.pid}, parent={os.getpid()})"
