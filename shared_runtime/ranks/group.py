"""The API process' side of a rank group: start it, give it work, notice when it is unwell, end it, start it anew.

No torch. One group is one forker process and `world_size` ranks. Whatever goes wrong with one rank ends them all:
after a death or a hang nobody knows which collective the others wait in.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from shared_runtime.ranks.fork import ForkerHandle
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import (
    LEADER_HOST,
    Beat,
    Cancel,
    Done,
    Failed,
    FromRank,
    Hosting,
    Lane,
    Leave,
    Meet,
    Order,
    RankFacts,
    Ready,
    Report,
    ToRank,
    Unfit,
    pack,
)
from shared_runtime.ranks.pipes import read_message
from shared_schema.errors import DeployError, H3Error, RankDied
from shared_schema.health import RankHealth, RankState

OnEvent = Callable[[object], None]

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 10.0
"""Between restarts of a group that keeps ending."""


@dataclass(frozen=True)
class GroupLimits:
    """How long a rank may be silent. Seconds."""

    stuck_s: float
    """At work, without passing a step, tile, clip or group of layers."""
    dead_s: float
    """Idle, without a beat."""
    load_s: float
    """From fork to ready: loading, compiling, warm-up."""


class RankGroup(Protocol):
    """What the rest of a service sees of its ranks."""

    async def run(self, command: object, *, lane: Lane = "work", on_event: OnEvent | None = None) -> object:
        """Have every rank do `command` and return the leader's result.

        Cancelling the caller cancels the command: the call ends once every rank has let go of it.

        Raises:
            RankDied: the group ended under it, or is not there.
            RankFailed: the command raised something foreign.
            H3Error: whatever else of our tree the command raised, its type kept.
        """

    async def until_ready(self) -> None:
        """Wait for the group to be there."""

    def health(self) -> tuple[RankHealth, ...]:
        """Every rank as it looks now."""

    @property
    def ready(self) -> bool:
        """Whether work would be taken at once."""

    @property
    def restarts(self) -> int:
        """Starts after the first."""

    @property
    def facts(self) -> RankFacts | None:
        """What the leader said of itself when it became ready."""


@dataclass
class _Rank:
    """A live rank as the group keeps it."""

    spec: RankSpec
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    last_beat: float
    state: RankState = "starting"
    facts: RankFacts | None = None


@dataclass
class _Task:
    """A command on its way: who still has to answer, and what the leader said."""

    future: asyncio.Future[object]
    on_event: OnEvent | None
    lane: Lane
    waiting: set[int]
    result: object = None
    failure: H3Error | None = None


@dataclass
class _Generation:
    """Everything that lives and dies with one start of the group."""

    ranks: list[_Rank] = field(default_factory=list)
    tasks: dict[int, _Task] = field(default_factory=dict)
    readers: list[asyncio.Task[None]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    meet: Meet | None = None
    reason: str = ""
    unfit: bool = False
    """Another start would fail for the same reason."""

    def state_of(self, rank: _Rank) -> RankState:
        """The rank's state, `busy` while it owes an answer on its main thread."""
        owes = any(task.lane == "work" and rank.spec.rank in task.waiting for task in self.tasks.values())
        return "busy" if owes and rank.state == "ready" else rank.state

    def end(self, reason: str) -> None:
        """Note why this generation is over; the first reason stays."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


class ProcessGroup:
    """Ranks in processes of this host, forked by one forker."""

    def __init__(self, specs: tuple[RankSpec, ...], entry: str, settings: object, limits: GroupLimits) -> None:
        self._specs = specs
        self._entry = entry
        self._settings = settings
        self._limits = limits
        self._forker: ForkerHandle | None = None
        self._now: _Generation = _Generation()
        self._starts = 0
        self._next_task = 0
        self._stopping = False
        self._succeeded = False
        """A start worked once: what ends the group later is no matter of files and settings."""
        self._fruitless = 0
        """Starts in a row that did not become ready."""
        self._exited: dict[int, int] = {}

    # What the service sees

    @property
    def ready(self) -> bool:
        """Whether work would be taken at once."""
        return self._now.ready.is_set() and not self._now.ended.is_set()

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(0, self._starts - 1)

    @property
    def facts(self) -> RankFacts | None:
        """What the leader said of itself when it became ready."""
        return self._now.ranks[0].facts if self.ready else None

    async def until_ready(self) -> None:
        """Wait for the group to be there."""
        while not self.ready:
            await asyncio.sleep(0.05)

    def health(self) -> tuple[RankHealth, ...]:
        """Every rank as it looks now."""
        now = time.monotonic()
        return tuple(
            RankHealth(
                name=rank.spec.name,
                pid=rank.pid,
                state=self._now.state_of(rank),
                beat_age_s=round(now - rank.last_beat, 3),
                device=rank.spec.device,
                weight_bytes=None if rank.facts is None else rank.facts.weight_bytes,
            )
            for rank in self._now.ranks
        )

    async def run(self, command: object, *, lane: Lane = "work", on_event: OnEvent | None = None) -> object:
        """Have every rank do `command` and return the leader's result; see `RankGroup.run`."""
        generation = self._now
        if not self.ready:
            raise RankDied("the rank group is not ready")
        self._next_task += 1
        number = self._next_task
        task = _Task(
            asyncio.get_running_loop().create_future(), on_event, lane, {r.spec.rank for r in generation.ranks}
        )
        generation.tasks[number] = task
        await self._send_all(generation, Order(number, lane, command))
        try:
            return await asyncio.shield(task.future)
        except asyncio.CancelledError:
            await self._send_all(generation, Cancel(number))
            await asyncio.wait([task.future])
            task.future.exception()
            raise

    async def _send_all(self, generation: _Generation, message: ToRank) -> None:
        data = pack(message)
        for rank in generation.ranks:
            rank.writer.write(data)
        try:
            for rank in generation.ranks:
                await rank.writer.drain()
        except OSError as error:
            generation.end(f"rank {rank.spec.name} does not listen: {error}")

    # Life

    async def supervise(self, on_ready: Callable[[], Coroutine[None, None, None]] | None = None) -> None:
        """Keep a group alive until cancelled.

        Raises:
            DeployError: the first start did not succeed, for whatever reason, or a later one cannot.
        """
        try:
            while True:
                if self._forker is not None and not self._forker.alive:
                    await self._forker.close()
                    self._forker = None
                if self._forker is None:
                    self._forker = await ForkerHandle.start(self._entry, self._on_exit)
                generation = self._now = _Generation()
                self._exited.clear()
                try:
                    await self._start(generation)
                    if on_ready is not None and not generation.ended.is_set():
                        await on_ready()
                    await self._watch(generation)
                finally:
                    await self._end(generation)
                self._succeeded = self._succeeded or generation.ready.is_set()
                if generation.unfit or not self._succeeded:
                    raise DeployError(generation.reason)
                logger.error("rank group ended: %s; starting it anew", generation.reason)
                self._fruitless = 0 if generation.ready.is_set() else self._fruitless + 1
                await asyncio.sleep(min(0.1 * 2 ** min(self._fruitless, 8), _MAX_PAUSE_S))
        finally:
            if self._forker is not None:
                await self._forker.close()

    async def _start(self, generation: _Generation) -> None:
        self._starts += 1
        assert self._forker is not None
        for spec in self._specs:
            pid, end = await self._forker.fork(spec, self._settings)
            reader, writer = await asyncio.open_unix_connection(sock=end, limit=1 << 30)
            rank = _Rank(spec, pid, reader, writer, last_beat=time.monotonic())
            generation.ranks.append(rank)
            if generation.meet is not None:
                writer.write(pack(generation.meet))
            if pid in self._exited:
                self._on_exit(pid, self._exited[pid])
            generation.readers.append(asyncio.create_task(self._listen(generation, rank), name=f"read {spec.name}"))
        waits = [asyncio.create_task(generation.ready.wait()), asyncio.create_task(generation.ended.wait())]
        done, pending = await asyncio.wait(waits, timeout=self._limits.load_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        if not done:
            generation.end(f"ranks were not ready within service.load_s, {self._limits.load_s:g} s")

    async def _listen(self, generation: _Generation, rank: _Rank) -> None:
        while True:
            message = await read_message(rank.reader)
            if message is None:
                generation.end(f"rank {rank.spec.name} closed its pipe")
                return
            self._hear(generation, rank, message)

    def _hear(self, generation: _Generation, rank: _Rank, message: FromRank) -> None:
        if not self._from_side_thread(generation, message):
            rank.last_beat = time.monotonic()
        match message:
            case Beat():
                pass
            case Ready(facts):
                rank.facts, rank.state = facts, "ready"
                if [each.state for each in generation.ranks] == ["ready"] * len(self._specs):
                    generation.ready.set()
            case Hosting(port):
                generation.meet = Meet(LEADER_HOST, port)
                for follower in generation.ranks[1:]:
                    follower.writer.write(pack(generation.meet))
            case Unfit(text, lasting):
                generation.unfit = generation.unfit or lasting
                generation.end(text)
            case Report(number, event):
                task = generation.tasks.get(number)
                if task is not None and task.on_event is not None and rank.spec.is_leader:
                    task.on_event(event)
            case Done(number, result):
                self._answered(generation, rank, number, result=result)
            case Failed(number, error, fatal):
                self._answered(generation, rank, number, failure=error)
                if fatal:
                    generation.end(f"rank {rank.spec.name} failed: {error}")

    def _from_side_thread(self, generation: _Generation, message: FromRank) -> bool:
        """Whether the message says nothing about the rank's main thread, which alone does the work."""
        match message:
            case Report(number) | Done(number) | Failed(number):
                task = generation.tasks.get(number)
                return task is not None and task.lane == "side"
            case _:
                return False

    def _answered(
        self,
        generation: _Generation,
        rank: _Rank,
        number: int,
        *,
        result: object = None,
        failure: H3Error | None = None,
    ) -> None:
        task = generation.tasks.get(number)
        if task is None:
            logger.error("rank %s answered task %d, which nobody asked for", rank.spec.name, number)
            return
        task.waiting.discard(rank.spec.rank)
        task.failure = task.failure or failure
        if rank.spec.is_leader:
            task.result = result
        if task.waiting:
            return
        del generation.tasks[number]
        if task.future.done():
            return
        if task.failure is None:
            task.future.set_result(task.result)
        else:
            task.future.set_exception(task.failure)

    def _on_exit(self, pid: int, code: int) -> None:
        self._exited[pid] = code
        for rank in self._now.ranks:
            if rank.pid == pid:
                rank.state = "dead"
                self._now.end(f"rank {rank.spec.name} (pid {pid}) left with code {code}")

    async def _watch(self, generation: _Generation) -> None:
        period = min(self._limits.stuck_s, self._limits.dead_s) / 4
        while not generation.ended.is_set():
            begun = time.monotonic()
            try:
                await asyncio.wait_for(generation.ended.wait(), timeout=period)
            except TimeoutError:
                self._look(generation, late=time.monotonic() - begun - period)

    def _look(self, generation: _Generation, late: float) -> None:
        """End the generation if a rank is silent for too long; `late` seconds this process itself stood still."""
        now = time.monotonic()
        for rank in generation.ranks:
            rank.last_beat += late  # what came meanwhile has not been read yet
            busy = generation.state_of(rank) == "busy"
            limit = self._limits.stuck_s if busy else self._limits.dead_s
            if now - rank.last_beat > limit:
                rank.state = "stuck"
                generation.end(f"rank {rank.spec.name} (pid {rank.pid}) gave no sign for {limit:g} s")

    async def _end(self, generation: _Generation) -> None:
        """Kill what is left of a generation, wait until it is gone, and fail what it was working on.

        A stop may cancel this half-way; nobody may wait for an answer of dead ranks even then.
        """
        generation.end("stopped")
        try:
            if self._stopping:
                await self._send_all(generation, Leave())
                await self._gone(generation, timeout=2.0)
            _kill_ranks(generation)
            await self._gone(generation, timeout=30.0)
        finally:
            _kill_ranks(generation)
            self._fail(generation)

    @staticmethod
    def _fail(generation: _Generation) -> None:
        for reader in generation.readers:
            reader.cancel()
        for rank in generation.ranks:
            rank.writer.close()
        for task in generation.tasks.values():
            if not task.future.done():
                task.future.set_exception(task.failure or RankDied(generation.reason))
        generation.tasks.clear()

    async def _gone(self, generation: _Generation, timeout: float) -> None:
        end = time.monotonic() + timeout
        while any(rank.state != "dead" for rank in generation.ranks) and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def stop_gently(self) -> None:
        """Let ranks leave by themselves when `supervise` is cancelled next."""
        self._stopping = True


def _kill_ranks(generation: _Generation) -> None:
    for rank in generation.ranks:
        if rank.state != "dead":
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
