"""Real rank groups for tests: functions of test modules run on every rank, over gloo, in processes that are reused.

This side never imports torch, so that whoever collects tests does not wait for it.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs

MOST = 4
START_S = 240.0
CALL_S = 200.0
"""Longer means that ranks wait for each other."""


@dataclass(frozen=True)
class Call:
    """On the first ranks, as `mesh`: call `module:function` with their `RankComm`, their task and these arguments."""

    mesh: Mesh
    function: str
    arguments: tuple[Any, ...]


class Ranks:
    """Some ranks, started when first asked for and kept until their context ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = loop
        self._most = most
        self._started: tuple[ProcessGroup, asyncio.Task[None]] | None = None

    def run(self, mesh: Mesh, function: str, *arguments: Any) -> Any:
        """What `module:function` returned on the leader of the first ranks, once all of them have returned."""
        return self._do(self._run(Call(mesh, function, arguments)))

    def close(self) -> None:
        """End every group."""
        self._do(self._close())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run(self, call: Call) -> object:
        if self._started is None:
            specs = rank_specs("test", Mesh(tp=self._most), ("cpu",) * self._most)
            group = ProcessGroup(specs, "tests.called:main", None, GroupLimits(stuck_s=600, dead_s=600, load_s=START_S))
            self._started = group, asyncio.create_task(group.supervise())
        group, _ = self._started
        async with asyncio.timeout(START_S):
            await group.until_ready()
        async with asyncio.timeout(CALL_S):
            return await group.run(call)

    async def _close(self) -> None:
        if self._started is not None:
            _, supervising = self._started
            supervising.cancel()
            await asyncio.wait([supervising])


@contextmanager
def rank_groups(most: int = MOST) -> Iterator[Ranks]:
    """`most` ranks, in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rank groups", daemon=True)
    thread.start()
    ranks = Ranks(loop, most)
    try:
        yield ranks
    finally:
        ranks.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
