"""An API process' handles on the processes that make its ranks: a forker on this host, a placer on a Ray cluster.

No torch, and no Ray. Both kinds of maker get the same requests over a socket pair and tell the same news.
"""

import asyncio
import contextlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import (
    Exited,
    FromMaker,
    Imported,
    KillRank,
    Made,
    MakeRank,
    Place,
    Placed,
    ToMaker,
    Unplaced,
)
from shared_schema.errors import DeployError, RankDied

Backend = Literal["mp", "ray"]
OnExit = Callable[[int, int], None]
"""Called with rank and exit code; negative codes are signals."""

Kind = Literal["forker", "placer"]
_LEAVE_S: dict[Kind, float] = {"forker": 0.0, "placer": 5.0}
"""How long a maker that was told to end may tidy up before it is killed."""
_MAX_NEWS = 1 << 16


class RankMaker:
    """One maker process. It must be started from a thread whose end may end the maker."""

    def __init__(self, kind: Kind, entry: str, on_exit: OnExit, folder: Path | None) -> None:
        self._kind = kind
        self._on_exit = on_exit
        self._ranks: set[int] = set()
        loop = asyncio.get_running_loop()
        self.imported: asyncio.Future[None] = loop.create_future()
        self._placing: asyncio.Future[Placed] | None = None
        self._making: dict[int, asyncio.Future[int]] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", f"shared_runtime.ranks.{kind}", str(theirs.fileno()), entry]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=folder)
        self._control.setblocking(False)
        self.alive = True
        loop.add_reader(self._control.fileno(), self._hear)

    @property
    def settled(self) -> bool:
        """Whether it has answered everything: one that has not may do late what nobody waits for any more."""
        return self._placing is None and not self._making

    async def place(self, specs: tuple[RankSpec, ...], wait_s: float) -> Placed:
        """Places for the ranks of a group.

        Raises:
            DeployError: there are none; it says what is needed and what was found.
            RankDied: the maker is gone.
        """
        placing: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._placing = placing
        self._ask(Place(specs, wait_s))
        return await placing

    async def make(self, spec: RankSpec, settings: object) -> tuple[int, socket.socket]:
        """A new rank: its pid, and our end of its pipe.

        Raises:
            RankDied: the maker or the rank is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        made = self._making[spec.rank] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                self._ask(MakeRank(spec, settings), theirs.fileno())
            self._ranks.add(spec.rank)
            pid = await made
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        return pid, ours

    def kill(self, rank: int) -> None:
        """End a rank; `on_exit` hears when it is gone."""
        with contextlib.suppress(RankDied):  # whose ranks are dead too
            self._ask(KillRank(rank))

    def _ask(self, request: ToMaker, *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [pickle.dumps(request)], descriptors)
        except OSError as error:
            raise RankDied(f"the process that makes ranks does not listen: {error}") from error

    def _hear(self) -> None:
        try:
            data = self._control.recv(_MAX_NEWS)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        news: FromMaker = pickle.loads(data)
        match news:
            case Imported() if not self.imported.done():
                self.imported.set_result(None)
            case Placed() | Unplaced():
                placing, self._placing = self._placing, None
                if placing is None or placing.done():
                    return
                if isinstance(news, Placed):
                    placing.set_result(news)
                else:
                    placing.set_exception(DeployError(news.reason))
            case Made(rank, pid):
                made = self._making.pop(rank)
                if not made.done():
                    made.set_result(pid)
            case Exited(rank, code):
                self._exited(rank, code)

    def _exited(self, rank: int, code: int) -> None:
        self._ranks.discard(rank)
        made = self._making.pop(rank, None)
        if made is not None and not made.done():
            made.set_exception(RankDied(f"rank {rank} could not be made"))
        self._on_exit(rank, code)

    def _lost(self) -> None:
        """The maker died, and its ranks with it."""
        self.alive = False
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        for future in (self.imported, self._placing):
            if future is not None and not future.done():
                future.set_exception(RankDied("the process that makes ranks is gone"))
        self._placing = None
        for rank in tuple(self._ranks):
            self._exited(rank, -signal.SIGKILL)

    async def close(self) -> None:
        """End the maker, and with it the ranks that still live."""
        if self.alive:
            self._lost()
        self._control.close()
        deadline = asyncio.get_running_loop().time() + _LEAVE_S[self._kind]
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() >= deadline:
                self._process.kill()
            await asyncio.sleep(0.01)

    def __repr__(self) -> str:
        return f"RankMaker({self._kind}, pid={self._process.pid}, parent={os.getpid()})"


class Makers:
    """What makes the ranks of one group: a forker, and with Ray a placer for all ranks but the leader."""

    def __init__(self, entry: str, backend: Backend, on_exit: OnExit, folder: Path | None = None) -> None:
        self._entry = entry
        self._kinds: tuple[Kind, ...] = ("forker", "placer") if backend == "ray" else ("forker",)
        self._on_exit = on_exit
        self._folder = folder
        self._makers: dict[Kind, RankMaker] = {}

    async def open(self) -> None:
        """Start the makers that are not there, and wait until they have imported.

        Raises:
            DeployError: Ray is not installed.
            RankDied: the imports failed; what they said is on stderr.
        """
        if "placer" in self._kinds and importlib.util.find_spec("ray") is None:
            raise DeployError("distributed_executor_backend: ray needs Ray: pip install ray, or use mp")
        for kind in self._kinds:
            old = self._makers.get(kind)
            if old is not None and not old.alive:
                await old.close()
            if old is None or not old.alive:
                self._makers[kind] = RankMaker(kind, self._entry, self._on_exit, self._folder)
        for maker in self._makers.values():
            # Whoever gives up waiting gives up for itself.
            await asyncio.shield(maker.imported)

    async def place(self, specs: tuple[RankSpec, ...], wait_s: float) -> Placed:
        """Where the ranks go; as `RankMaker.place`."""
        if "placer" not in self._kinds:
            return Placed(specs, ("this host",) * len(specs))
        return await self._makers["placer"].place(specs, wait_s)

    async def make(self, spec: RankSpec, settings: object) -> tuple[int, socket.socket]:
        """A new rank; as `RankMaker.make`."""
        return await self._maker_of(spec).make(spec, settings)

    @property
    def settled(self) -> bool:
        """Whether nothing that was asked for is still to come."""
        return all(maker.settled for maker in self._makers.values())

    def kill(self, spec: RankSpec) -> None:
        """End a rank; `on_exit` hears when it is gone."""
        self._maker_of(spec).kill(spec.rank)

    def _maker_of(self, spec: RankSpec) -> RankMaker:
        return self._makers[self._kinds[0] if spec.is_leader else self._kinds[-1]]

    async def close(self) -> None:
        """End the makers, and with them the ranks that still live."""
        for maker in self._makers.values():
            await maker.close()
        self._makers.clear()
