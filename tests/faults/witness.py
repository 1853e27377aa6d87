"""What a crash run saw: the accepted jobs, a timeline, and what should not have been."""

import sys
import time
from dataclasses import dataclass, field

from tests.end_to_end.pair import FINAL
from tests.faults.storm import Order


@dataclass
class Witness:
    """One run's account. `loud` prints the timeline as it grows."""

    seed: int
    loud: bool = False
    begun: float = field(default_factory=time.monotonic)
    accepted: dict[str, Order] = field(default_factory=dict)
    """Orders by the id of their job."""
    seen: dict[str, dict[str, object]] = field(default_factory=dict)
    """The last answer to a GET of every job."""
    wrong: list[str] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def note(self, text: str) -> None:
        """Something happened."""
        line = f"{self.now_s:7.1f} s  {text}"
        self.timeline.append(line)
        if self.loud:
            print(line, file=sys.stderr, flush=True)

    def complain(self, text: str) -> None:
        """Something happened that must not."""
        self.wrong.append(f"at {self.now_s:.1f} s: {text}")
        self.note(f"WRONG: {text}")

    def accept(self, job: str, order: Order) -> None:
        """A POST was answered with this job."""
        if job in self.accepted:
            self.complain(f"{job} was given to {self.accepted[job].key} and to {order.key}")
        self.accepted[job] = order

    def look(self, video: dict[str, object]) -> None:
        """A GET was answered: jobs never go back but for a retry, and what is final stays as it is."""
        job = str(video["id"])
        before, self.seen[job] = self.seen.get(job), video
        if before is None:
            return
        if before["status"] in FINAL and (before["status"], before["error"]) != (video["status"], video["error"]):
            self.complain(f"{job} was final and changed: {_short(before)} -> {_short(video)}")
        same_run = before["attempt"] == video["attempt"] and (before["status"], video["status"]) != (
            "in_progress",
            "queued",
        )
        if same_run and _number(video["progress"]) < _number(before["progress"]) and video["status"] not in FINAL:
            self.complain(f"progress of {job} fell: {_short(before)} -> {_short(video)}")
        if _number(video["attempt"]) < _number(before["attempt"]):
            self.complain(f"attempts of {job} fell: {_short(before)} -> {_short(video)}")

    def open(self) -> list[str]:
        """Accepted jobs that were not final when last seen."""
        return [job for job in self.accepted if self.seen.get(job, {"status": "queued"})["status"] not in FINAL]

    def report(self) -> str:
        """For a failed run: its seed, what was wrong, and when what happened."""
        return "\n".join([f"seed {self.seed}", *self.wrong, "timeline:", *self.timeline])


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _short(video: dict[str, object]) -> str:
    return ", ".join(f"{key} {video[key]}" for key in ("status", "phase", "progress", "attempt", "error"))
