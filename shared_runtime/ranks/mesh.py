"""Who is who in a rank group: names, coordinates and groups from degrees. Pure."""

from dataclasses import dataclass
from typing import Literal

Axis = Literal["tp", "ulysses"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Mesh:
    """A group as a grid: tensor-parallel ranks are neighbours, Ulysses ranks are `tp` apart.

    tp 2 x ulysses 2:   rank 0 = (u0, tp0)   rank 1 = (u0, tp1)   rank 2 = (u1, tp0)   rank 3 = (u1, tp1)
    """

    tp: int = 1
    ulysses: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole group."""
        return self.tp * self.ulysses

    def index(self, axis: Axis, rank: int) -> int:
        """Where `rank` stands on an axis."""
        return rank % self.tp if axis == "tp" else rank // self.tp

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ on `axis` alone, every such group, in an order that all ranks share."""
        if axis == "tp":
            return tuple(tuple(u * self.tp + t for t in range(self.tp)) for u in range(self.ulysses))
        return tuple(tuple(u * self.tp + t for u in range(self.ulysses)) for t in range(self.tp))


@dataclass(frozen=True)
class RankSpec:
    """One rank: its place in the group, its device, and the name it has in `ps`."""

    name: str
    rank: int
    mesh: Mesh
    device: str
    """`cpu`, or an index into `CUDA_VISIBLE_DEVICES`."""
    host: str = LOOPBACK
    """Where the leader listens for the others."""
    visible: str | None = None
    """`CUDA_VISIBLE_DEVICES` of this rank; None: as it is in the process that makes it."""

    @property
    def world_size(self) -> int:
        """Ranks of the whole group."""
        return self.mesh.world_size

    @property
    def is_leader(self) -> bool:
        """Whether this rank answers for the group."""
        return self.rank == 0


def rank_specs(role: str, mesh: Mesh, devices: tuple[str, ...]) -> tuple[RankSpec, ...]:
    """The ranks of a group, one a device: `encoder-tp0`, `diffusion-u3`, `diffusion-u1-tp0`."""
    return tuple(RankSpec(_name(role, mesh, rank), rank, mesh, device) for rank, device in enumerate(devices))


def _name(role: str, mesh: Mesh, rank: int) -> str:
    tensor = f"tp{mesh.index('tp', rank)}"
    ulysses = f"u{mesh.index('ulysses', rank)}"
    match mesh.tp > 1, mesh.ulysses > 1:
        case True, False:
            return f"{role}-{tensor}"
        case True, True:
            return f"{role}-{ulysses}-{tensor}"
        case _:
            return f"{role}-{tensor if role == 'encoder' else ulysses}"
