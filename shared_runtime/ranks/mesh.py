"""Who is who in a rank group: names and coordinates from degrees. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankSpec:
    """One rank: its place in the group, its device, and the name it has in `ps`."""

    name: str
    rank: int
    world_size: int
    device: str
    """`cpu`, or an index into `CUDA_VISIBLE_DEVICES`."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank answers for the group."""
        return self.rank == 0


def rank_specs(role: str, axis: str, devices: tuple[str, ...]) -> tuple[RankSpec, ...]:
    """The ranks of a group, one a device: `rank_specs("encoder", "tp", ("cpu",))` names `encoder-tp0`."""
    return tuple(
        RankSpec(name=f"{role}-{axis}{rank}", rank=rank, world_size=len(devices), device=device)
        for rank, device in enumerate(devices)
    )
