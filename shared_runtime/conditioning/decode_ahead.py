"""Files that are decoded before their turn, in threads, for as long as they fit beside each other. Runs in ranks."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

T = TypeVar("T")

AT_ONCE = 4
"""Files that are decoded at a time: FFmpeg has threads of its own."""
SMALL_BYTES = 128 * 2**20
"""Files that fit into it together are decoded beside each other, however small the largest one is. A reference video
of the least length takes more at the released size."""
_LOOK_S = 0.02


class Stopped(Exception):
    """Nobody waits for this file any more."""


class Progress:
    """What threads do, told by the one that waits for them: beats belong to it alone."""

    def __init__(self) -> None:
        self._moved = threading.Event()
        self._stopped = threading.Event()

    def one(self) -> None:
        """A frame was decoded, or a whole file."""
        if self._stopped.is_set():
            raise Stopped
        self._moved.set()

    def stop(self) -> None:
        """Have every thread end at its next frame."""
        self._stopped.set()

    def follow(self, task: Future[T], beat: Callable[[], None]) -> T:
        """Wait for a task, and beat while anything gets done."""
        while not wait((task,), _LOOK_S).done:
            if self._moved.is_set():
                self._moved.clear()
                beat()
        return task.result()


@dataclass(frozen=True)
class Part(Generic[T]):
    """A file that is yet to be decoded."""

    nbytes: int
    """Of what is held from its beginning until it is let go of, as far as one can know before."""
    decode: Callable[[Progress], T]
    """Called on a thread; calls `Progress.one` at every frame."""


class DecodeAhead(Generic[T]):
    """Parts in their order, each decoded once. A context: at its end nothing is decoded any more.

    What is begun and not let go of never takes more than the largest part by itself does, or `SMALL_BYTES`. All but
    the decoding happens on the thread that takes.
    """

    def __init__(self, parts: Sequence[Part[T]]) -> None:
        self._waiting = deque(parts)
        self._begun: deque[tuple[int, Future[T]]] = deque()
        self._room = max(SMALL_BYTES, *(part.nbytes for part in parts), 0)
        self._taken = 0
        self._progress = Progress()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="media")

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, beat: Callable[[], None]) -> T:
        """The next part's; who asks for it has let go of the one before.

        `beat` is called on this thread as often as a frame or a file was finished: it tells that work goes on.
        """
        self._taken = 0
        self._begin()
        self._taken, task = self._begun.popleft()
        return self._progress.follow(task, beat)

    def _begin(self) -> None:
        """What fits beside what is held already; the next one to be taken always does."""
        held = self._taken + sum(nbytes for nbytes, _ in self._begun)
        while self._waiting and held + self._waiting[0].nbytes <= self._room:
            part = self._waiting.popleft()
            held += part.nbytes
            self._begun.append((part.nbytes, self._pool.submit(part.decode, self._progress)))
