"""The API process' side of a rank group: start it, give it work, notice when it is unwell, end it, start it anew.

No torch. One group is `world_size` ranks and what makes them: one forker process, or with Ray also a placer. Whatever
goes wrong with one rank ends them all: after a death or a hang nobody knows which collective the others wait in.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from shared_runtime.ranks.generation import Generation, OnEvent, Rank, Task
from shared_runtime.ranks.makers import Backend, Makers
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import (
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
    Placed,
    RankFacts,
    Ready,
    Report,
    Resting,
    ToRank,
    Unfit,
    pack,
)
from shared_runtime.ranks.pipes import read_message
from shared_runtime.tracing import adopt, errand, span
from shared_schema.errors import DeployError, H3Error, RankDied
from shared_schema.health import RankHealth
from shared_schema.trace import Span

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 10.0
"""Between restarts of a group that keeps ending."""
_GONE_S = 30.0
"""A killed rank with much memory on a GPU is not gone at once."""
_NEWS_S = 0.2
"""By which the news of a rank's death may come after the errors that its death made on others."""
_REST_S = 5.0
"""What the leader has left of a task is no matter of the ranks that ended the group: so long it may still be ended."""


@dataclass(frozen=True)
class GroupLimits:
    """How long a rank may be silent. Seconds."""

    stuck_s: float
    """At work, without passing a step, tile, clip or group of layers; the whole rest of a task."""
    dead_s: float
    """Idle, without a beat."""
    load_s: float
    """From fork to ready: loading, compiling, warm-up."""
    place_s: float = 30.0
    """Until a cluster has room for the group."""


class RankGroup(Protocol):
    """What the rest of a service sees of its ranks."""

    async def run(self, command: object, *, lane: Lane = "work", on_event: OnEvent | None = None) -> object:
        """Have every rank do `command` and return the leader's result.

        `work` is done in the order of the calls; while the leader ends the `Rest` of one command, the next one goes on.

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


class ProcessGroup:
    """Ranks in processes of their own: the leader's on this host, the others there too or, with Ray, anywhere."""

    def __init__(
        self,
        specs: tuple[RankSpec, ...],
        entry: str,
        settings: object,
        limits: GroupLimits,
        backend: Backend = "mp",
    ) -> None:
        self._specs = specs
        self._settings = settings
        self._limits = limits
        self._makers = Makers(entry, backend, self._on_exit)
        self._now: Generation = Generation()
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
                offloaded_bytes=None if rank.facts is None else rank.facts.offloaded_bytes,
                load_format=None if rank.facts is None else rank.facts.load_format,
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
        task = Task(asyncio.get_running_loop().create_future(), on_event, lane, {r.spec.rank for r in generation.ranks})
        generation.tasks[number] = task
        with span(type(command).__name__):
            await self._send_all(generation, Order(number, lane, command, errand()))
            try:
                return await self._answer(generation, number, task)
            finally:
                adopt(task.spans)

    async def _answer(self, generation: Generation, number: int, task: Task) -> object:
        """What the leader said, once every rank has answered; if the caller is cancelled, the command is."""
        try:
            return await asyncio.shield(task.future)
        except asyncio.CancelledError:
            # Whoever cancels again waits too: until then ranks work, on files that would be removed under them.
            with contextlib.suppress(asyncio.CancelledError):
                await self._send_all(generation, Cancel(number))
            while not task.future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task.future])
            task.future.exception()
            raise

    async def _send_all(self, generation: Generation, message: ToRank) -> None:
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
                generation = self._now = Generation()
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
            await self._makers.close()

    async def _start(self, generation: Generation) -> None:
        self._starts += 1
        limit_s = self._limits.place_s + self._limits.load_s
        try:
            async with asyncio.timeout(limit_s):
                await self._makers.open()
                placed = await self._makers.place(self._specs, self._limits.place_s)
        except DeployError as error:
            generation.end(error.message)
        except RankDied as error:
            generation.end(f"no place for the ranks: {error}")
        except TimeoutError:
            generation.end(f"no place for the ranks within {limit_s:g} s")
            # What hangs while it imports would hang the next start too.
            await self._makers.close()
        else:
            await self._fill(generation, placed)

    async def _fill(self, generation: Generation, placed: Placed) -> None:
        """Make a rank at every place and wait until all of them are ready, or one is not to be."""
        logger.debug("places: %s", ", ".join(placed.nodes))
        try:
            async with asyncio.timeout(self._limits.load_s):
                for spec in placed.specs:
                    await self._make(generation, spec)
                await _first(generation.ready, generation.ended)
        except TimeoutError:
            generation.end(f"ranks were not ready within service.load_s, {self._limits.load_s:g} s")
        except RankDied as error:
            generation.end(error.message)

    async def _make(self, generation: Generation, spec: RankSpec) -> None:
        pid, end = await self._makers.make(spec, self._settings)
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=1 << 30)
        generation.ranks.append(Rank(spec, pid, reader, writer, last_beat=time.monotonic()))
        if generation.meet is not None:
            writer.write(pack(generation.meet))
        if spec.rank in self._exited:
            self._on_exit(spec.rank, self._exited[spec.rank])
        listening = asyncio.create_task(self._listen(generation, generation.ranks[-1]), name=f"read {spec.name}")
        listening.add_done_callback(partial(_heard_out, generation, spec.name))
        generation.readers.append(listening)

    async def _listen(self, generation: Generation, rank: Rank) -> None:
        while (message := await read_message(rank.reader)) is not None:
            self._hear(generation, rank, message)
        generation.end(f"rank {rank.spec.name} closed its pipe")

    def _hear(self, generation: Generation, rank: Rank, message: FromRank) -> None:
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
                generation.meet = Meet(rank.spec.host, port)
                for follower in generation.ranks[1:]:
                    follower.writer.write(pack(generation.meet))
            case Unfit(text, lasting):
                generation.unfit = generation.unfit or lasting
                generation.end(text)
            case Report(number, event):
                task = generation.tasks.get(number)
                if task is not None and task.on_event is not None and rank.spec.is_leader:
                    task.on_event(event)
            case Resting(number):
                task = generation.tasks.get(number)
                if task is not None and rank.spec.is_leader:
                    task.resting_since = time.monotonic()
            case Done(number, result, spans):
                self._answered(generation, rank, number, spans, result=result)
            case Failed(number, error, fatal, spans):
                self._answered(generation, rank, number, spans, failure=error)
                if fatal:
                    generation.end(f"rank {rank.spec.name} failed: {error}")

    def _from_side_thread(self, generation: Generation, message: FromRank) -> bool:
        """Whether the message says nothing about the rank's main thread, which alone does the work."""
        match message:
            case Report(number) | Done(number) | Failed(number):
                task = generation.tasks.get(number)
                return task is not None and (task.lane == "side" or task.resting_since is not None)
            case _:
                return False

    def _answered(
        self,
        generation: Generation,
        rank: Rank,
        number: int,
        spans: tuple[Span, ...],
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
            task.result, task.spans = result, spans
        if task.waiting:
            return
        del generation.tasks[number]
        if task.future.done():
            return
        if task.failure is None:
            task.future.set_result(task.result)
        else:
            task.future.set_exception(task.failure)

    def _on_exit(self, number: int, code: int) -> None:
        self._exited[number] = code
        for rank in self._now.ranks:
            if rank.spec.rank == number and rank.state != "dead":
                rank.state = "dead"
                self._now.end(f"rank {rank.spec.name} (pid {rank.pid}) left with code {code}")

    async def _watch(self, generation: Generation) -> None:
        period = min(self._limits.stuck_s, self._limits.dead_s) / 4
        while not generation.ended.is_set():
            begun = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await generation.ended.wait()
                return
            now = time.monotonic()
            generation.look(now, now - begun - period, stuck_s=self._limits.stuck_s, dead_s=self._limits.dead_s)

    async def _end(self, generation: Generation) -> None:
        """Kill what is left of a generation, wait until it is gone, and fail what it was working on.

        A stop may cancel this half-way; nobody may wait for an answer of dead ranks even then.
        """
        generation.end("stopped")
        try:
            if self._stopping:
                await self._send_all(generation, Leave())
                await _until(generation.gone, 2.0)
            await _until(generation.rested, _REST_S)
            await _until(generation.blame_the_dead, _NEWS_S)
            self._kill_ranks(generation)
            await _until(generation.gone, _GONE_S)
            if not (self._makers.settled and generation.gone()):
                logger.warning("ranks may be left: ending what makes them")
                await self._makers.close()
        finally:
            self._kill_ranks(generation)
            self._fail(generation)

    def _kill_ranks(self, generation: Generation) -> None:
        for rank in generation.ranks:
            if rank.state != "dead":
                self._makers.kill(rank.spec)

    @staticmethod
    def _fail(generation: Generation) -> None:
        for reader in generation.readers:
            reader.cancel()
        for rank in generation.ranks:
            rank.writer.close()
        for task in generation.tasks.values():
            if not task.future.done():
                task.future.set_exception(task.failure or RankDied(generation.reason))
        generation.tasks.clear()

    def stop_gently(self) -> None:
        """Let ranks leave by themselves when `supervise` is cancelled next."""
        self._stopping = True


async def _until(met: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not met() and time.monotonic() < end:
        await asyncio.sleep(0.01)


async def _first(*events: asyncio.Event) -> None:
    """Wait for any of these."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _heard_out(generation: Generation, name: str, listening: asyncio.Task[None]) -> None:
    """Nobody hears this rank any more; if that is because of what it told, it would be noticed only as stuck."""
    if listening.cancelled() or (error := listening.exception()) is None:
        return
    logger.error("what rank %s told could not be taken", name, exc_info=error)
    generation.end(f"what rank {name} told could not be taken")
