"""What was judged, kept line by line, and the table of it next to what must hold. Pure but for one file."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

NEEDED: dict[str, dict[str, float]] = {
    "t2va": {"colour": 0.95, "shape": 0.90, "motion": 0.95, "pitch": 0.95, "clicks": 0.90},
    "fl2va": {"first": 0.90, "last": 0.90, "continuous": 0.90},
    "ref2va": {"colour": 0.90, "shape": 0.90, "motion": 0.90, "pitch": 0.90},
}
"""Shares by task and aspect; what is not named is only told."""
TURBO_LOSS = 0.05
"""By how much a Turbo run may be below the run without it."""


COLUMNS = ("task", "clips", "aspect", "right", "of", "%", "needed")


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
    """A file of results that grows: what is in it is not made again. Its first line says what made them."""

    def __init__(self, file: Path, made_by: Mapping[str, str]) -> None:
        """`made_by` is everything that decides a verdict: weights, adapter, schedule, seed, what was broken.

        Raises:
            ValueError: the file's results were made by something else.
        """
        self._file = file
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(made_by) + "\n", encoding="utf-8")
        self._mend()
        first, *lines = file.read_text(encoding="utf-8").splitlines()
        if json.loads(first) != made_by:
            raise ValueError(f"{file} was made by {first}, not by {json.dumps(made_by)}: choose another --out")
        self.all = [Result(**json.loads(line)) for line in lines]

    @classmethod
    def kept(cls, file: Path) -> Self:
        """Those of a run before.

        Raises:
            OSError: there are none.
        """
        return cls(file, json.loads(file.read_text(encoding="utf-8").partition("\n")[0]))

    def _mend(self) -> None:
        """Drop a last line that a killed run has not written to its end."""
        whole, _, torn = self._file.read_bytes().rpartition(b"\n")
        if torn:
            self._file.write_bytes(whole + b"\n")

    def names(self) -> set[str]:
        """Of the clips that were judged."""
        return {result.name for result in self.all}

    def add(self, result: Result) -> None:
        """Keep one more."""
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

    def table(self, without: "Results | None" = None) -> str:
        """Markdown: what was right, what is needed of a run, and what the run `without` Turbo had where this has it."""
        theirs = {} if without is None else without.shares()
        head = [*COLUMNS, *(["% without"] if without is not None else [])]
        lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] * 3 + ['---:'] * (len(head) - 3))}|"]
        for key, (right, of) in sorted(self.shares().items(), key=lambda share: _place(share[0])):
            needed = NEEDED[key[0]].get(key[2])
            cells = [*key, str(right), str(of), _percent(right, of), "" if needed is None else f"{100 * needed:.0f}"]
            if without is not None:
                cells.append(_percent(*theirs[key]) if key in theirs else "")
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def missed(self, tasks: Collection[str]) -> list[str]:
        """What does not hold, over all clips of each of `tasks`; an aspect that no clip shows does not."""
        shares, found = self.shares(), []
        for task in tasks:
            for aspect, needed in NEEDED[task].items():
                right, of = shares.get((task, "all", aspect), (0, 0))
                if not of:
                    found.append(f"{task}: {aspect} was not seen")
                elif right < needed * of:
                    found.append(f"{task}: {aspect} {100 * right / of:.1f} %, needed {100 * needed:.0f} %")
        return found

    def lost_to(self, turbo: "Results") -> list[str]:
        """Where `turbo` is worse than this by more than it may be, in what it made.

        Raises:
            ValueError: it made nothing that this has.
        """
        found, theirs = [], turbo.shares()
        both = {key: share for key, share in self.shares().items() if key in theirs}
        if not both:
            raise ValueError("the two runs have no task in common")
        for key, (right, of) in both.items():
            if key[1] == "all" and key[2] in NEEDED[key[0]]:
                there = theirs[key][0] / theirs[key][1]
                if there < right / of - TURBO_LOSS:
                    found.append(f"{key[0]}: {key[2]} {100 * there:.1f} % with Turbo, {100 * right / of:.1f} % without")
        return found


def _percent(right: int, of: int) -> str:
    return f"{100 * right / of:.1f}"


def _place(key: tuple[str, str, str]) -> tuple[str, bool, str, bool, str]:
    """By task; the whole of it before its groups, and what is needed before what is only told."""
    task, group, aspect = key
    return task, group != "all", group, aspect not in NEEDED[task], aspect
