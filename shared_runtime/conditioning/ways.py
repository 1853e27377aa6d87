"""How each layer of the video VAE's encoder is computed on a GPU: a table that was measured once. Pure.

    python -m benchmarks.encode --tune        writes the table

It lies in the repository and is not made at start: another choice makes other last bits, and two starts of one version
are to make the same ones.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

Way = Literal["fp32", "tf32", "split", "halved", "quartered", "stacked"]
"""How a convolution is made.

fp32       without tensor cores
tf32       of operands rounded once
split      three convolutions of pieces
halved     the same, the largest of the three in halves of the channels: sums within tensor cores are half as long
quartered  in quarters
stacked    one convolution, of pieces stacked as channels
"""

Kind = Literal["clip", "picture"]
Layout = Literal["channels_last", "contiguous"]
TABLE = Path(__file__).with_name("ways.json")


@dataclass(frozen=True)
class KindWays:
    """What is known about clips, or about single frames."""

    tiles_at_once: int
    """At most, in one batch; fewer where the GPU has no room for their values."""
    layout: Layout = "contiguous"
    """Of values and weights in memory."""
    layers: dict[str, Way] = field(default_factory=dict)
    """By name, as the VAE's encoder has it."""

    def way(self, layer: str) -> Way:
        """How a layer is computed; one that was never measured is split."""
        return self.layers.get(layer, "split")


@dataclass(frozen=True)
class Ways:
    """The table."""

    clip: KindWays
    picture: KindWays
    measured: str
    """Where and when, or that it was not."""

    @classmethod
    def read(cls, file: Path = TABLE) -> Self:
        """The table of the repository, or another one."""
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(KindWays(**content["clip"]), KindWays(**content["picture"]), content["measured"])

    def write(self, file: Path = TABLE) -> None:
        """In the form that `read` takes."""
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def of(self, kind: Kind) -> KindWays:
        """What is known about one kind."""
        return self.clip if kind == "clip" else self.picture

    def but(self, kind: Kind, known: KindWays) -> Self:
        """With something else about one kind."""
        return replace(self, clip=known) if kind == "clip" else replace(self, picture=known)
