"""What a request's `quality` stands for, and which forwards of a clip may be skipped for it. Pure.

`high` is lossy: where the first block of the transformer changes the sequence about as it did in the last forward
that was computed, what the other blocks added then is added again, and they are not run.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Quality = Literal["lossless", "high"]


class StepCache(BaseModel):
    """When a forward is skipped after its first block."""

    model_config = ConfigDict(frozen=True)

    threshold: float
    """A change below it skips; 0 never does."""
    warm_up_forwards: int = Field(ge=1)
    """Computed always, from the first."""
    most_in_a_row: int
    """Skipped one after the other, at most."""

    def allows(self, change: float) -> bool:
        """Whether a change is small enough. One that is no number is not."""
        return change < self.threshold


class VideoStepCache(StepCache):
    """When the forwards of a job of `quality: high` are skipped, and how many were."""

    profile: Literal["first-block"] = "first-block"
    skipped_forwards: int | None = None
    """Of all outputs together; None until they are made."""


PROFILES: Mapping[Quality, StepCache | None] = {
    "lossless": None,
    "high": StepCache(threshold=0.04, warm_up_forwards=4, most_in_a_row=1),
}


@dataclass(frozen=True)
class Skips:
    """The forwards of one clip so far."""

    forwards: int = 0
    """Finished, either way."""
    skipped: int = 0
    in_a_row: int = 0
    """Skipped since the last one that was computed."""

    def possible(self, profile: StepCache) -> bool:
        """Whether the next forward may be skipped, if little changes."""
        return self.forwards >= profile.warm_up_forwards and self.in_a_row < profile.most_in_a_row

    def then(self, *, skipped: bool) -> "Skips":
        """One forward later."""
        if not skipped:
            return replace(self, forwards=self.forwards + 1, in_a_row=0)
        return Skips(self.forwards + 1, self.skipped + 1, self.in_a_row + 1)


def joint_change(streams: Iterable[tuple[float, float]]) -> float:
    """The largest relative change among streams: by each, how far it moved and how large it was.

    The larger, not a mean: sound is one row in a hundred, and a mean would not hear it.
    """
    changes = [moved / size if size else math.inf for moved, size in streams]
    return math.nan if any(math.isnan(each) for each in changes) else max(changes)
