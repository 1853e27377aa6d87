"""What an API process keeps of one start of a rank group: its ranks and the commands they are doing. No IO here."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import Lane, Meet, RankFacts
from shared_schema.errors import H3Error, RankDied, RankFailed
from shared_schema.health import RankState
from shared_schema.trace import Span

OnEvent = Callable[[object], None]


@dataclass
class Rank:
    """A live rank as the group keeps it."""

    spec: RankSpec
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    last_beat: float
    state: RankState = "starting"
    facts: RankFacts | None = None


@dataclass
class Task:
    """A command on its way: who still has to answer, and what the leader said."""

    future: asyncio.Future[object]
    on_event: OnEvent | None
    lane: Lane
    waiting: set[int]
    result: object = None
    failure: H3Error | None = None
    spans: tuple[Span, ...] = ()
    """The leader's."""
    resting_since: float | None = None
    """When the leader's main thread took the next task, and another thread what is left of this one."""


@dataclass
class Generation:
    """Everything that lives and dies with one start of the group."""

    ranks: list[Rank] = field(default_factory=list)
    tasks: dict[int, Task] = field(default_factory=dict)
    readers: list[asyncio.Task[None]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    meet: Meet | None = None
    reason: str = ""
    unfit: bool = False
    """Another start would fail for the same reason."""

    def state_of(self, rank: Rank) -> RankState:
        """The rank's state, `busy` while it owes an answer to a `work` order."""
        owes = any(task.lane == "work" and rank.spec.rank in task.waiting for task in self.tasks.values())
        return "busy" if owes and rank.state == "ready" else rank.state

    def look(self, now: float, late: float, *, stuck_s: float, dead_s: float) -> None:
        """End if a rank is silent for too long, or the rest of a task takes as long; `late` seconds nobody listened."""
        for rank in self.ranks:
            rank.last_beat += late  # what came meanwhile has not been read yet
            limit = stuck_s if self.state_of(rank) == "busy" else dead_s
            if now - rank.last_beat > limit:
                self._stuck(rank, limit)
        for task in self.tasks.values():
            if task.resting_since is not None:
                task.resting_since += late
                if now - task.resting_since > stuck_s:
                    self._stuck(self.ranks[0], stuck_s)

    def _stuck(self, rank: Rank, limit: float) -> None:
        rank.state = "stuck"
        self.end(f"rank {rank.spec.name} (pid {rank.pid}) gave no sign for {limit:g} s")

    def gone(self) -> bool:
        """Whether no rank lives."""
        return all(rank.state == "dead" for rank in self.ranks)

    def rested(self) -> bool:
        """Whether no task is left that the leader has only the rest of, and that all who owe an answer could end."""
        able = {rank.spec.rank for rank in self.ranks if rank.state == "ready"}
        return not any(task.resting_since is not None and task.waiting <= able for task in self.tasks.values())

    def blame_the_dead(self) -> bool:
        """A rank that dies breaks the collectives of the others: what they raise then is its death, and no bug.

        False while there is such an error, and no death.
        """
        broken = [task for task in self.tasks.values() if isinstance(task.failure, RankFailed)]
        dead = next((rank for rank in self.ranks if rank.state == "dead"), None)
        if dead is None:
            return not broken
        for task in broken:
            task.failure = RankDied(f"rank {dead.spec.name} (pid {dead.pid}) died: {task.failure}")
        return True

    def end(self, reason: str) -> None:
        """Note why this generation is over; the first reason stays."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()
