"""Ulysses: every rank holds part of the packed sequence, and inside attention all of it for part of the heads.

Lengths need not divide: rows are padded to a multiple of the axis, and the padding is cut off before any attention sees
it. Runs in diffusion ranks; torch.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from diffusion_service.model.attention import Attend, attend_with
from shared_runtime.ranks.comm import RankComm
from shared_schema.deploy.model import AttentionBackend


class SequenceShard:
    """This rank's rows of the packed sequence of the request under way; see `diffusion_service.model.dit.Split`."""

    def __init__(self, comm: RankComm) -> None:
        group = comm.group("ulysses")
        assert group is not None
        self.group = group
        self.size = comm.size("ulysses")
        self.index = comm.index("ulysses")
        self.length = 0
        """Rows of the whole sequence."""
        self.told_length = torch.zeros((), dtype=torch.int64)
        """The same, for the operator below."""

    @property
    def rows(self) -> int:
        """Rows that each rank holds, padding included."""
        return -(-self.length // self.size)

    def begin(self, length: int) -> None:
        """From here on the sequence has `length` rows."""
        self.length = length
        self.told_length.fill_(length)

    def local(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of a whole sequence. A copy: torch.compile would take a view's place for another symbol."""
        part = _padded(whole, self.rows * self.size, dim).narrow(dim, self.index * self.rows, self.rows)
        return part.clone(memory_format=torch.contiguous_format)

    def gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence again, on every rank, without padding. A collective."""
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        return torch.cat(parts, dim=dim).narrow(dim, 0, self.length)


class _Exchange:
    """Rows for heads and back, among the ranks of the axis."""

    def __init__(self, group: dist.ProcessGroup, length: int) -> None:
        self._group = group
        self._size = group.size()
        self._length = length

    def to_heads(self, *local: torch.Tensor) -> list[torch.Tensor]:
        """Each `(1, rows, heads, dim)` to `(1, length, heads / size, dim)`, all at once. A collective."""
        _, rows, heads, width = local[0].shape
        sent = local[0].new_empty(self._size, rows, len(local), heads // self._size, width)
        for number, each in enumerate(local):
            sent[:, :, number].copy_(each.view(rows, self._size, -1, width).transpose(0, 1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return list(received.flatten(0, 1)[None, : self._length].unbind(2))

    def to_rows(self, by_heads: torch.Tensor, rows: int) -> torch.Tensor:
        """`(1, length, heads / size, dim)` to `(1, rows, heads, dim)`. A collective."""
        _, _, heads, width = by_heads.shape
        sent = _padded(by_heads, rows * self._size, 1).reshape(self._size, rows, heads, width).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.transpose(0, 1).reshape(1, rows, self._size * heads, width).contiguous()


def _padded(whole: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """With zeros up to `length`."""
    missing = length - whole.shape[dim]
    if missing == 0:
        return whole
    shape = list(whole.shape)
    shape[dim] = missing
    return torch.cat([whole, whole.new_zeros(shape)], dim=dim)


@torch.library.custom_op("minimax_h3::attend_by_heads", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor, group: str, backend: str
) -> torch.Tensor:
    """One node for torch.compile, for which the length must be data: no shape here says it, and a number would be
    compiled in. The group goes by torch's own name for it."""
    exchange = _Exchange(_resolve_process_group(group), int(length))  # type: ignore[arg-type]
    attend = attend_with(backend)  # type: ignore[arg-type]
    return exchange.to_rows(attend(*exchange.to_heads(query, key, value)), query.shape[1])


@_attend.register_fake
def _shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor, group: str, backend: str
) -> torch.Tensor:
    return query.new_empty(query.shape)


def attend_by_heads(shard: SequenceShard, backend: AttentionBackend) -> Attend:
    """Attention over all rows and this rank's heads, for this rank's rows and all heads."""
    length, group = shard.told_length, shard.group.group_name
    return lambda query, key, value: _attend(query, key, value, length, group, backend)
