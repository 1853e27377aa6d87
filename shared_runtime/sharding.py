"""Tensor parallelism from outside: which linears are cut, how a rank reads only its part, and how parts are joined.

The model's own code stays single-device. Runs in ranks; torch.

    COLUMN    rows of the weight are dealt out; the output stays in parts          to_q, gate_proj
    FUSED     the same for two halves that lie above each other in one weight      SwiGLU's fused projection
    GATHERED  the same, and the parts of the output are gathered                   AdaLN projections
    ROW       columns of the weight are dealt out; partial outputs are summed      to_out, down_proj
"""

from collections.abc import Mapping
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group

from shared_runtime.ranks.comm import RankComm
from shared_schema.errors import DeployError


class Cut(Enum):
    """How a linear's weight `(out, in)` is dealt over the ranks of the tensor-parallel axis."""

    COLUMN = auto()
    FUSED = auto()
    GATHERED = auto()
    ROW = auto()


ShardPlan = Mapping[str, Cut]
"""Patterns of module names (`*` crosses dots) to cuts; what no pattern names is replicated."""


class RowParallelLinear(nn.Linear):
    """A linear over this rank's part of the input; the ranks' partial outputs are summed.

    Parts and sum are FP32 whatever the weights are, and rounded once at the end, as one rank's own product is: in BF16
    parts that are rounded before the sum add an error of the size that BF16 has anyway.
    """

    group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in / size)` to `(..., out)`, equal on every rank."""
        summed: torch.Tensor = _summed_product(input, self.weight, self.group.group_name)
        return summed


@torch.library.custom_op("minimax_h3::summed_product", mutates_args=())
def _summed_product(input: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """One node for torch.compile. An operator takes no objects: the group goes by torch's own name for it."""
    summed = _float_product(input, weight)
    dist.all_reduce(summed, group=_resolve_process_group(group))  # type: ignore[arg-type]
    return summed.to(input.dtype)


@_summed_product.register_fake
def _shape(input: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def _float_product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`input @ weight.T` in FP32, which is how it is accumulated: on a GPU without a copy of the weight."""
    if input.device.type == "cuda" and input.dtype is not torch.float32:
        rows = input.reshape(-1, input.shape[-1])
        return torch.mm(rows, weight.t(), out_dtype=torch.float32).view(*input.shape[:-1], -1)
    return nn.functional.linear(input.float(), weight.float())


class GatheredLinear(nn.Linear):
    """A linear that makes this rank's part of the output; the parts are gathered."""

    group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)`, equal on every rank."""
        return gathered(nn.functional.linear(input, self.weight, self.bias), self.group)


def gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts `(..., out / size)` of all ranks, one after another. A collective."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim=-1)


class Sharding:
    """A plan on one rank of a tensor-parallel axis."""

    def __init__(self, plan: ShardPlan, comm: RankComm) -> None:
        self._plan = plan
        self._group = comm.group("tp")
        self._size = comm.size("tp")
        self._index = comm.index("tp")

    def cut_of(self, module: str) -> Cut | None:
        """The cut of a module; None where it is replicated, or nothing is cut at all."""
        if self._size == 1:
            return None
        return next((cut for pattern, cut in self._plan.items() if fnmatchcase(module, pattern)), None)

    def check_heads(self, what: str, heads: int) -> None:
        """Attention is dealt out by whole heads.

        Raises:
            DeployError: they do not divide by the axis.
        """
        if heads % self._size:
            raise DeployError(f"{what} has {heads} heads, which do not divide by tensor_parallel_size {self._size}")

    def apply(self, model: nn.Module) -> None:
        """Give every linear that is cut this rank's shape and the collective that joins it. Weights stay on meta.

        Raises:
            DeployError: a dimension does not divide by the axis.
        """
        for name, module in list(model.named_modules()):
            cut = self.cut_of(name)
            if cut is None:
                continue
            if not isinstance(module, nn.Linear):
                raise TypeError(f"{name} is a {type(module).__name__}, not a linear")
            self._shrink(name, module, cut)

    def _shrink(self, name: str, linear: nn.Linear, cut: Cut) -> None:
        features = linear.in_features if cut is Cut.ROW else linear.out_features
        if features % self._size or (cut is Cut.FUSED and features // 2 % self._size):
            raise DeployError(
                f"{name} has {features} features, which do not divide by tensor_parallel_size {self._size}"
            )
        match cut:
            case Cut.ROW:
                if linear.bias is not None:
                    raise TypeError(f"{name} has a bias, which a row cut would add once a rank")
                linear.in_features //= self._size
                linear.__class__ = RowParallelLinear
            case Cut.GATHERED:
                linear.out_features //= self._size
                linear.__class__ = GatheredLinear
            case Cut.COLUMN | Cut.FUSED:
                linear.out_features //= self._size
        linear.group = self._group  # type: ignore[assignment]
        shape = (linear.out_features, linear.in_features)
        linear.weight = nn.Parameter(torch.empty(shape, dtype=linear.weight.dtype, device="meta"), requires_grad=False)
        if linear.bias is not None:
            bias = torch.empty(linear.out_features, dtype=linear.bias.dtype, device="meta")
            linear.bias = nn.Parameter(bias, requires_grad=False)

    def read(self, name: str, shape: tuple[int, ...], reader: Any) -> torch.Tensor:
        """This rank's part of the stored tensor `name`: no more of it is read from the file."""
        module, _, kind = name.rpartition(".")
        cut = self.cut_of(module)
        if cut is None:
            return reader[...]  # type: ignore[no-any-return]
        if cut is Cut.ROW:
            return reader[:, self._range(shape[1])]  # type: ignore[no-any-return]
        if cut is Cut.FUSED:
            half = shape[0] // 2
            part = self._range(half)
            parts = [reader[part], reader[slice(half + part.start, half + part.stop)]]
            return torch.cat(parts, dim=0)
        assert kind in ("weight", "bias")
        return reader[self._range(shape[0])]  # type: ignore[no-any-return]

    def _range(self, extent: int) -> slice:
        part = extent // self._size
        return slice(self._index * part, (self._index + 1) * part)
