"""What was judged, kept line by line, and the table of it next to what must hold. Pure but for one file."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

NEEDED: dict[str, dict[str, float]] = {
    "t2va": {"colour": 0.95, "shape": 0.90, "motion": 0.95, "pitch": 0.95, "clicks": 0.90},
    "fl2va": {"first": 0.90, "last": 0.90, "continuous": 0.90},
    "ref2va": {"colour": 0.90, "shape": 0.90, "motion": 0.90, "pitch": 0.90},
}
"""Shares by task and aspect; what is not named is only told."""
TURBO_LOSS = 0.05
"""By how much a Turbo run may be below the run without it."""


@dataclass(frozen=True)
class Result:
    """One judged clip."""

    name: str
    group: str
    task: str
    right: dict[str, bool]
    """By aspect; `clicks` only where the scene has any."""
    seconds: float
    """From request to file."""


class Results:
    """A file of results that grows: what is in it is not made again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        self.all = [Result(**json.loads(line)) for line in lines]

    def names(self) -> set[str]:
        """Of the clips that were judged."""
        return {result.name for result in self.all}

    def add(self, result: Result) -> None:
        """Keep one more."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(result)) + "\n")
        self.all.append(result)

    def shares(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """By task, group and aspect how many were right, and of how many; the group `all` is the task's whole."""
        counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for result in self.all:
            for aspect, right in result.right.items():
                for group in ("all", result.group):
                    counts[result.task, group, aspect][0] += right
                    counts[result.task, group, aspect][1] += 1
        return {key: (right, of) for key, (right, of) in counts.items()}

    def table(self) -> str:
        """Markdown: what was right, and what is needed."""
        lines = ["| task | clips | aspect | right | of | % | needed |", "|---|---|---|---:|---:|---:|---:|"]
        for (task, group, aspect), (right, of) in sorted(self.shares().items()):
            needed = NEEDED[task].get(aspect)
            wanted = "" if needed is None else f"{100 * needed:.0f}"
            lines.append(f"| {task} | {group} | {aspect} | {right} | {of} | {100 * right / of:.1f} | {wanted} |")
        return "\n".join(lines)

    def missed(self) -> list[str]:
        """What does not hold, over all clips of a task."""
        shares, found = self.shares(), []
        for task, aspects in NEEDED.items():
            for aspect, needed in aspects.items():
                right, of = shares.get((task, "all", aspect), (0, 0))
                if of and right < needed * of:
                    found.append(f"{task}: {aspect} {100 * right / of:.1f} %, needed {100 * needed:.0f} %")
        return found

    def lost_to(self, turbo: "Results") -> list[str]:
        """Where `turbo` is worse than this by more than it may be."""
        found, theirs = [], turbo.shares()
        for key, (right, of) in self.shares().items():
            if key[1] == "all" and key in theirs and key[2] in NEEDED[key[0]]:
                there = theirs[key][0] / theirs[key][1]
                if there < right / of - TURBO_LOSS:
                    found.append(f"{key[0]}: {key[2]} {100 * there:.1f} % with Turbo, {100 * right / of:.1f} % without")
        return found
