"""What an API process keeps of one start of a rank group: its ranks and the commands they are doing. No IO here."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import Lane, Meet, RankFacts
from shared_schema.errors import H3Error
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
        """The rank's state, `busy` while it owes an answer on its main thread."""
        owes = any(task.lane == "work" and rank.spec.rank in task.waiting for task in self.tasks.values())
        return "busy" if owes and rank.state == "ready" else rank.state

    def end(self, reason: str) -> None:
        """Note why this generation is over; the first reason stays."""
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()
