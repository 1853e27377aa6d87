"""Forwards that end after their first block, for `quality: high`: what the other blocks added is added again. Torch.

Runs in diffusion ranks, which all decide alike: on sums over all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shared_schema.quality import Skips, StepCache, joint_change

Total = Callable[[Sequence[float]], Sequence[float]]
"""Sums over all ranks, the same bits on each. A collective."""


@dataclass(frozen=True)
class Reuse:
    """How a clip may be made with fewer blocks, and what decides it."""

    profile: StepCache
    streams: tuple[torch.Tensor, ...]
    """By stream, picture and sound, which rows of the packed sequence are denoised: conditions and text change less."""


class FirstBlockCache:
    """Of one clip, on one rank: what its blocks added in the forward that was computed last.

    Takes room for two sequences of the rank's rows.
    """

    def __init__(self, profile: StepCache, streams: torch.Tensor, total: Total) -> None:
        """`streams` are `(streams, rows)`: 1 where a row of this rank belongs to a stream, else 0."""
        self.skips = Skips()
        self._profile = profile
        self._streams = streams
        self._total = total
        self._first = self._begun = self._rest = torch.empty(0)
        """What the first block added; the sequence after it, while the others run; what those added."""

    def reuse(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
        """The sequence after the last block, without running it; None: run the others, then `keep`. A collective.

        Args:
            before: `(1, rows, hidden)`, as the first block got it.
            after: as it made it.
        """
        added = after - before
        if self.skips.possible(self._profile) and self._profile.allows(self._change(added)):
            self.skips = self.skips.then(skipped=True)
            return after + self._rest
        self._first, self._begun, self._rest = added, after, torch.empty(0)
        return None

    def keep(self, made: torch.Tensor) -> None:
        """`made` is the sequence after the last block."""
        self._rest = made - self._begun
        self._begun = torch.empty(0)
        self.skips = self.skips.then(skipped=False)

    def _change(self, added: torch.Tensor) -> float:
        amounts = torch.cat([self._amounts(added - self._first), self._amounts(self._first)])
        sums = self._total(amounts.tolist())
        count = len(self._streams)
        return joint_change(zip(sums[:count], sums[count:], strict=True))

    def _amounts(self, rows: torch.Tensor) -> torch.Tensor:
        """`(streams,)`: the sum of all absolute values of each."""
        by_row = rows[0].abs().sum(dim=-1, dtype=torch.float32)
        return (self._streams * by_row).sum(dim=-1)
