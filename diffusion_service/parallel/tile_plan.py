"""Which rank decodes which tile of which clip, and who needs whose edges. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class Span:
    """A tile's place along one axis, in pixels."""

    start: int
    length: int
    before: int
    """Pixels shared with the tile before it, which this tile owns and blends."""
    after: int
    """Pixels shared with the tile after it, which that one owns."""

    @property
    def owned(self) -> slice:
        """Where the pixels that this tile owns lie on the canvas."""
        return slice(self.start, self.start + self.length - self.after)


def spans(starts: list[int], lengths: list[int], overlaps: list[int]) -> tuple[Span, ...]:
    """The tiles of one axis, from what `AutoencoderKLMiniMaxH3._split_tiles` returns."""
    edges = [0, *overlaps, 0]
    return tuple(
        Span(start, length, edges[place], edges[place + 1])
        for place, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )


@dataclass(frozen=True)
class Tile:
    """One tile of a canvas."""

    index: int
    y: Span
    x: Span
    above: int | None
    """Index of the tile whose bottom rows this one blends."""
    left: int | None
    """Index of the tile whose right columns this one blends."""


def tiles(rows: tuple[Span, ...], columns: tuple[Span, ...]) -> tuple[Tile, ...]:
    """All tiles of a canvas, row by row."""
    width = len(columns)
    return tuple(
        Tile(
            index=i * width + j,
            y=y,
            x=x,
            above=(i - 1) * width + j if i else None,
            left=i * width + j - 1 if j else None,
        )
        for i, y in enumerate(rows)
        for j, x in enumerate(columns)
    )


@dataclass(frozen=True)
class Deal:
    """Tiles of consecutive clips dealt over ranks, window by window.

    A window is the fewest clips whose tiles divide evenly, so that a rank never holds more tiles than one clip has;
    within it each rank gets a run of neighbours, because those need least of each other.
    """

    ranks: int
    clips: int
    tiles: int
    """Of one clip."""

    @property
    def window(self) -> int:
        """Clips in flight."""
        return self.ranks // gcd(self.tiles, self.ranks)

    def windows(self) -> Iterator[range]:
        """The clips of each window, in order."""
        for first in range(0, self.clips, self.window):
            yield range(first, min(first + self.window, self.clips))

    def owner(self, clip: int, tile: int) -> int:
        """The rank that decodes a tile and blends and finishes the pixels that it owns."""
        first = clip - clip % self.window
        count = min(self.window, self.clips - first) * self.tiles
        return ((clip - first) * self.tiles + tile) * self.ranks // count
