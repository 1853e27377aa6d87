"""What the code that runs now works for: the request id of its log lines, and the trace that its spans belong to.

Both are in context variables, which asyncio hands to every task and worker thread. Runs in every process; no torch.
"""

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from shared_schema.trace import Span, TraceParent

MOST = 400
"""Spans of one trace; what comes later is not kept."""


@dataclass
class Recorder:
    """The spans of one request in one process."""

    process: str
    spans: list[Span] = field(default_factory=list)

    def add(self, spans: Iterable[Span]) -> None:
        """Keep finished spans."""
        self.spans.extend(list(spans)[: MOST - len(self.spans)])


@dataclass(frozen=True)
class Errand:
    """What code works for; travels with orders to ranks."""

    request_id: str
    parent: TraceParent | None = None
    """None: nobody wants to know what takes time."""


@dataclass(frozen=True)
class _Now:
    errand: Errand
    recorder: Recorder | None


_NOW: ContextVar[_Now | None] = ContextVar("errand", default=None)


def request_id() -> str | None:
    """Of the request that the running code works for."""
    now = _NOW.get()
    return None if now is None else now.errand.request_id


def errand() -> Errand | None:
    """To hand to another process."""
    now = _NOW.get()
    return None if now is None else now.errand


def collected() -> tuple[Span, ...]:
    """What was measured so far of this errand, here."""
    now = _NOW.get()
    return () if now is None or now.recorder is None else tuple(now.recorder.spans)


@contextlib.contextmanager
def working_for(errand: Errand | None, recorder: Recorder | None = None) -> Iterator[None]:
    """What runs inside works for that errand; its spans go to `recorder`."""
    token = _NOW.set(None if errand is None else _Now(errand, recorder))
    try:
        yield
    finally:
        _NOW.reset(token)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Measure what runs inside, if somebody wants to know; spans inside are parts of it."""
    now = _NOW.get()
    if now is None or now.recorder is None or now.errand.parent is None:
        yield
        return
    own, parent = secrets.token_hex(8), now.errand.parent
    inner = replace(now.errand, parent=TraceParent(parent.trace, own))
    token = _NOW.set(_Now(inner, now.recorder))
    begin, start = time.time(), time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        _NOW.reset(token)
        now.recorder.add(
            [Span(id=own, parent=parent.span, name=name, process=now.recorder.process, begin=begin, seconds=seconds)]
        )


def adopt(spans: Iterable[Span]) -> None:
    """Keep spans that another process measured for this errand."""
    now = _NOW.get()
    if now is not None and now.recorder is not None:
        now.recorder.add(spans)
