"""Makes one rank on the host where Ray put it, and carries its pipe. Runs as an actor in a Ray worker; no torch.

The rank is a process of its own, forked and ended as on every other host. It dies with this actor.
"""

import asyncio
import socket
from pathlib import Path

from shared_runtime.ranks.makers import Makers
from shared_runtime.ranks.mesh import RankSpec

CHUNK_BYTES = 1 << 20
_ROOT = Path(__file__).parents[2]
"""Where the packages lie: a Ray worker runs somewhere else."""


class Outpost:
    """The actor. One rank at a time; its messages pass as the bytes that they are in a pipe."""

    def __init__(self, entry: str) -> None:
        self._makers = Makers(entry, "mp", self._on_exit, _ROOT)
        self._spec: RankSpec | None = None
        self._pipe: socket.socket | None = None
        self._exit: asyncio.Future[int] | None = None

    async def open(self) -> None:
        """Import what ranks need, ahead of the first one.

        Raises:
            RankDied: that failed.
        """
        await self._makers.open()

    async def make(self, spec: RankSpec, settings: object) -> int:
        """A rank; returns its pid here.

        Raises:
            RankDied: there is none.
        """
        await self._makers.open()
        self._spec = spec
        self._exit = asyncio.get_running_loop().create_future()
        pid, self._pipe = await self._makers.make(spec, settings)
        return pid

    async def hear(self) -> bytes:
        """What the rank has to say, once it has something to say; nothing once it has closed its pipe."""
        assert self._pipe is not None
        try:
            return await asyncio.get_running_loop().sock_recv(self._pipe, CHUNK_BYTES)
        except ConnectionError:
            return b""

    async def tell(self, data: bytes) -> bool:
        """Pass these bytes to the rank. Returns whether it still listens; nothing is what tells it to end."""
        assert self._pipe is not None
        try:
            if not data:
                self._pipe.shutdown(socket.SHUT_WR)
            await asyncio.get_running_loop().sock_sendall(self._pipe, data)
        except OSError:
            return False
        return True

    async def kill(self) -> None:
        """End the rank, whatever it is doing."""
        if self._spec is not None:
            self._makers.kill(self._spec)

    async def exit_code(self) -> int:
        """Of the rank, once it is gone; negative codes are signals."""
        assert self._exit is not None
        assert self._pipe is not None
        code = await self._exit
        self._pipe.close()
        return code

    def _on_exit(self, _rank: int, code: int) -> None:
        if self._exit is not None and not self._exit.done():
            self._exit.set_result(code)
