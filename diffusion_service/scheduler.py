"""Which job is next: priority, then the key that has the fewest jobs under way, then first come. Pure.

It schedules jobs; the sigma schedule of a job is diffusers', by way of `sampling/prepare.py`.

Looking ahead never reorders: what is encoded ahead is made in the order in which a service without look-ahead would
make it, so a job that comes later with a higher priority goes first, encoded or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Key = str | None
"""Name of the API key that a job belongs to; None where there are no keys."""
Turn = tuple[int, int]
"""Place among the jobs that were taken: the lowest goes first."""


@dataclass(frozen=True)
class Waiting:
    """All that decides when a queued job is made."""

    id: str
    sequence: int
    """Order of acceptance."""
    priority: int = 0
    """Higher goes first."""
    key: Key = None


def choose(
    candidates: Sequence[Waiting],
    running: Mapping[Key, int],
    recent: Sequence[Key] = (),
    limit: int | None = None,
) -> str | None:
    """The id of the job to take next, or None where none may be taken.

    Args:
        candidates: queued jobs that nobody has taken, in any order.
        running: how many jobs of each key are under way, on all services.
        recent: keys of the jobs taken last, oldest first; between equal keys the one served longest ago goes first.
        limit: the most jobs of one key that may be under way; None: no limit.
    """
    allowed = [each for each in candidates if limit is None or running.get(each.key, 0) < limit]
    if not allowed:
        return None
    served = {key: place for place, key in enumerate(recent, start=1)}

    def precedence(each: Waiting) -> tuple[int, int, int, int]:
        return -each.priority, running.get(each.key, 0), served.get(each.key, 0), each.sequence

    return min(allowed, key=precedence).id


def overtakes(candidate: Waiting, taken: Waiting) -> bool:
    """Whether a job that waits has to be made before one that was taken to be encoded ahead.

    Priority alone decides: a fair share that changed meanwhile is no reason to take work back.
    """
    return candidate.priority > taken.priority


def turn_of(each: Waiting, taken: int) -> Turn:
    """Sorts the jobs that were taken into the order in which they are made; `taken` counts up."""
    return -each.priority, taken
