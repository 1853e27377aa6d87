"""An adapter that is bound: what ranks need to merge it. Plain data; crosses the pipe to the ranks."""

from dataclasses import dataclass
from pathlib import Path

from shared_schema.deploy.settings import Partition


@dataclass(frozen=True)
class BoundModule:
    """The two matrices of one linear of the transformer, by their names in the file."""

    module: str
    """By diffusers' name."""
    down: str
    """`(rank, in)`."""
    up: str
    """`(out, rank)`."""
    factor: float
    """Alpha over rank: what `up @ down` is multiplied by at scale 1."""
    swapped: bool
    """The halves of `up` stand the other way round in the file."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA file, every tensor of which is bound to one partition."""

    name: str
    file: Path
    scale: float
    partition: Partition
    modules: tuple[BoundModule, ...]
    written_ns: int
    """When the file was last written: one that changes is another adapter."""
