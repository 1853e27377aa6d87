"""How far a job is and how long it takes: finished work, weighted by stage times that were measured. Pure.

A `Pace` is what finished jobs taught about this service's speed; a `Course` is one job on its way. Both are values:
what learns or moves on is a new one. Times are seconds on the caller's clock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from diffusion_service.jobs.job import Job, VideoPlan
from shared_schema.videos import Phase

Stage = Literal["media", "text", "vae", "transferring", "denoising", "sound", "decoding", "muxing"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Finer than the phases that a caller sees: media files, text encoder and video VAE; audio VAE and video VAE."""
PER_OUTPUT: tuple[Stage, ...] = ("denoising", "sound", "decoding", "muxing")
"""Done anew for every output of a job; what comes before is done once."""

PRIOR_S = 0.25
"""What was expected of a stage weighs as much as so many seconds of it: parts of a short one are not equally long."""
NEWEST_SHARE = 0.4
"""Weight of the newest job in what is expected of the next."""
UNKNOWN: Mapping[Stage, float] = {
    "media": 1.0,
    "text": 1.0,
    "vae": 6.0,
    "transferring": 1.0,
    "denoising": 70.0,
    "sound": 1.0,
    "decoding": 18.0,
    "muxing": 2.0,
}
"""Shares of a job before any job was measured; only how they compare to each other counts."""
_MEASURED_AS: Mapping[Stage, tuple[str, ...]] = {
    "text": ("encode_text",),
    "vae": ("encode_vae",),
    "transferring": ("transfer",),
    "denoising": ("prepare", "denoise"),
    "sound": ("audio_decode",),
    "decoding": ("video_decode",),
    "muxing": ("mux",),
}
"""Names of `stage_durations` that make up a stage."""


@dataclass(frozen=True)
class Pace:
    """Seconds that a unit of work takes, by stage, as the last jobs had it. The first job has nothing to go by."""

    rates: Mapping[tuple[str, Stage], float] = field(default_factory=dict)
    """By task and stage; denoising with skipped forwards has a pace of its own."""
    job_s: float | None = None
    """A whole job."""

    def expects(self, plan: VideoPlan) -> Mapping[Stage, float] | None:
        """Seconds by stage of one output; None before a job of any task was measured."""
        rates = {stage: self._rate(plan, stage) for stage in STAGES}
        if rates["denoising"] is None:
            return None
        return {stage: (rate or 0.0) * units(plan, stage) for stage, rate in rates.items()}

    def whole(self, plan: VideoPlan) -> float | None:
        """Seconds of a whole job; None before one was measured."""
        expected = self.expects(plan)
        if expected is None:
            return None
        return sum(each * (plan.num_outputs if stage in PER_OUTPUT else 1) for stage, each in expected.items())

    def _rate(self, plan: VideoPlan, stage: Stage) -> float | None:
        """This work's own, else that of this task without loss, else the mean of the others'."""
        named = (self.rates.get((name, stage)) for name in (_work(plan, stage), plan.task))
        own = next((rate for rate in named if rate is not None), None)
        others = [rate for (_, named), rate in self.rates.items() if named == stage]
        return own if own is not None else sum(others) / len(others) if others else None

    def learned(self, plan: VideoPlan, durations: Mapping[str, float], whole_s: float) -> "Pace":
        """This pace after a job was finished: its `stage_durations`, and seconds from start to end."""
        rates = dict(self.rates)
        for stage, seconds in measured(plan, durations).items():
            name = (_work(plan, stage), stage)
            rates[name] = _nearer(rates.get(name), seconds / units(plan, stage))
        return Pace(rates, _nearer(self.job_s, whole_s))


def by_its_own_pace(job: Job, now: float) -> float | None:
    """Seconds left of a running job that another service makes, judged by its progress alone. `now` is Unix time."""
    if job.started_at is None or job.progress < 1:
        return None
    return round((now - job.started_at) * (100 - job.progress) / job.progress, 1)


def _work(plan: VideoPlan, stage: Stage) -> str:
    """What of a stage takes equally long."""
    fewer = stage == "denoising" and plan.quality != "lossless"
    return f"{plan.task} {plan.quality}" if fewer else str(plan.task)


def _nearer(before: float | None, newest: float) -> float:
    return newest if before is None else before + NEWEST_SHARE * (newest - before)


def units(plan: VideoPlan, stage: Stage) -> float:
    """How much work a stage of one output is; grows as its time does, so that jobs of other sizes can be told."""
    pixels = plan.height * plan.width * plan.num_frames / 1e6
    media = sum((each.height or 0) * (each.width or 0) * (each.frames or 1) for each in plan.references) / 1e6
    match stage:
        case "media":
            return 1.0 + media
        case "vae":
            return media
        case "text" | "transferring":
            return 1.0
        case "denoising":
            return plan.forwards * pixels
        case "sound":
            return plan.num_frames
        case "decoding" | "muxing":
            return pixels


def measured(plan: VideoPlan, durations: Mapping[str, float]) -> Mapping[Stage, float]:
    """Seconds by stage of one output. What took no time, because its result was there already, is left out."""
    spent = {stage: sum(durations.get(name, 0.0) for name in names) for stage, names in _MEASURED_AS.items()}
    # All of an encoding that is neither of the two: its way to the encoder, and the files.
    spent["media"] = durations.get("encode", 0.0) - spent["text"] - spent["vae"]
    return {
        stage: seconds / (plan.num_outputs if stage in PER_OUTPUT else 1)
        for stage, seconds in spent.items()
        if seconds > 0 and units(plan, stage) > 0
    }


def phase_of(stage: Stage) -> Phase:
    """The phase that a caller sees."""
    match stage:
        case "media" | "text" | "vae":
            return "encoding"
        case "sound":
            return "decoding"
        case _:
            return stage


@dataclass(frozen=True)
class Course:
    """One job on its way: which part of which stage is finished, since when, and what is left."""

    expected: Mapping[Stage, float]
    """Seconds of each stage of one output, or shares where nothing was measured."""
    known: bool
    """Whether `expected` is seconds."""
    outputs: int
    started: float
    """When the job became `in_progress`."""
    entered: float
    """When the current stage began."""
    at: float
    """When the last part was finished."""
    stage: Stage = "media"
    output: int = 0
    part: float = 0.0
    """Finished share of the current stage, 0 to 1."""
    seen: Mapping[Stage, float] = field(default_factory=dict)
    """Seconds that stages of this very job took, or will take at the pace of their finished parts."""
    percent: int = 0

    @classmethod
    def begin(cls, pace: Pace, plan: VideoPlan, now: float) -> "Course":
        """A job that starts now."""
        known = pace.expects(plan)
        expected = known or {stage: share if units(plan, stage) else 0.0 for stage, share in UNKNOWN.items()}
        return cls(expected, known is not None, plan.num_outputs, started=now, entered=now, at=now)

    def reached(self, stage: Stage, done: int, of: int, output: int, now: float) -> "Course":
        """`done` of `of` parts of a stage are finished. `percent` never falls, and never is 100."""
        here = self
        if (output, stage) != (self.output, self.stage):
            here = self._enter(stage, output, now if done == 0 else self.at)
        part = done / max(of, 1)
        if part > 0:
            here = replace(here, part=part, at=now, seen={**here.seen, stage: here._took(stage, part, now)})
        if part >= 1 and stage != STAGES[-1]:
            here = here._enter(STAGES[STAGES.index(stage) + 1], output, now)
        return replace(here, percent=max(self.percent, here._share()))

    def _took(self, stage: Stage, part: float, now: float) -> float:
        """Seconds of the current stage, of which that part is finished."""
        expected = self.expected[stage] if self.known and part < 1 else 0.0
        weight = min(1.0, PRIOR_S / expected) if expected else 0.0
        return (now - self.entered + weight * expected) / (part + weight)

    def _enter(self, stage: Stage, output: int, now: float) -> "Course":
        seen = dict(self.seen)
        if self.part < 1:
            seen[self.stage] = now - self.entered
        return replace(self, stage=stage, output=output, part=0.0, entered=now, at=now, seen=seen)

    def _share(self) -> int:
        spent = self.at - self.started
        left = self._left()
        return min(99, int(100 * spent / (spent + left))) if spent + left > 0 else 0

    def _left(self) -> float:
        """Seconds from the last finished part to the end."""
        here = STAGES.index(self.stage)
        later = sum(self._seconds(stage) for stage in STAGES[here + 1 :])
        whole = sum(self._seconds(stage) for stage in PER_OUTPUT)
        return self._seconds(self.stage) * (1 - self.part) + later + whole * (self.outputs - 1 - self.output)

    def _seconds(self, stage: Stage) -> float:
        if stage in self.seen:
            return self.seen[stage]
        if self.known:
            return self.expected[stage]
        return self.expected[stage] * self._slowness()

    def _slowness(self) -> float:
        """Seconds of a share, from the stages seen so far: between their mean and the slowest, which for unknown
        machines was straighter than either.
        """
        seen = {stage: took for stage, took in self.seen.items() if self.expected[stage] > 0}
        if not seen:
            return 1.0
        mean = sum(seen.values()) / sum(self.expected[stage] for stage in seen)
        return math.sqrt(mean * max(took / self.expected[stage] for stage, took in seen.items()))

    def left(self, now: float) -> float | None:
        """Seconds to the end; None while there is nothing to go by."""
        if not self.known and not self.seen:
            return None
        return max(0.0, self._left() - (now - self.at))
