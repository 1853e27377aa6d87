"""A supervised rank group that many tests use, one after the other, on either backend; and what is left of it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.makers import Backend
from shared_runtime.ranks.mesh import Mesh, rank_specs
from tests.shared_runtime.ranks.puppet import Puppet, Say

PUPPETS = "tests.shared_runtime.ranks.puppet:main"
QUICK = GroupLimits(stuck_s=1.5, dead_s=2.5, load_s=30.0, place_s=30.0)
START_S = 100.0
BODY_S = 60.0
GONE_S = 15.0

Body = Callable[[ProcessGroup], Awaitable[None]]


class LivingGroup:
    """Does what tests say with a group of puppets."""

    def __init__(self, backend: Backend, ranks: int) -> None:
        specs = rank_specs("puppet", Mesh(tp=ranks), ("cpu",) * ranks)
        self.backend = backend
        self.pids: set[int] = set()
        """Every process that ever was of it: ranks, and what made them."""
        self._group = ProcessGroup(specs, PUPPETS, Puppet(), QUICK, backend)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rank group", daemon=True)
        self._thread.start()
        self._supervising = asyncio.run_coroutine_threadsafe(self._group.supervise(self._note), self._loop)

    async def _note(self) -> None:
        for rank in self._group.health():
            self.pids |= lineage(rank.pid)

    def do(self, body: Body, *, restarts: int = 0) -> None:
        """Run `body`; afterwards the group has started anew so many times, and works."""

        async def work() -> None:
            async with asyncio.timeout(START_S):
                await self._group.until_ready()
            before = self._group.restarts
            async with asyncio.timeout(BODY_S):
                await body(self._group)
                await self._group.until_ready()
                await self._group.run(Say())
            assert self._group.restarts - before == restarts

        asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def close(self) -> None:
        """Stop the group; nothing of it is left."""
        self._supervising.cancel()
        asyncio.run_coroutine_threadsafe(_ended(self._group), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert_gone(self.pids)


async def _ended(group: ProcessGroup) -> None:
    """Until `supervise`, which was cancelled, has done what it does at the end."""
    while asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def living_group(backend: Backend, ranks: int) -> Iterator[LivingGroup]:
    """A group for several tests."""
    group = LivingGroup(backend, ranks)
    try:
        yield group
    finally:
        group.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def lineage(pid: int) -> set[int]:
    """A rank, its forker, and the Ray worker above it if there is one."""
    forker = parent_of(pid)
    above = parent_of(forker)
    worker = Path(f"/proc/{above}/cmdline").read_bytes().startswith(b"ray::")
    return {pid, forker, above} if worker else {pid, forker}


def assert_gone(pids: set[int]) -> None:
    end = time.monotonic() + GONE_S
    while (left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def kill_the_parent_of_a_group(backend: Backend) -> None:
    """Kill an API process while one of its ranks is stopped; nothing of the group is left."""
    command = [sys.executable, "-m", "tests.shared_runtime.ranks.parent", backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            everyone = lineage(pids[0]) | lineage(pids[1])
            os.kill(pids[1], signal.SIGSTOP)
        finally:
            parent.kill()
    assert_gone(everyone)
