"""FP8 products in the DiT's main blocks and its condition projection, quantized while weights are read. Torch.

Runs in diffusion ranks.

Every row of a weight and every row of an activation has a scale of its own; activations get theirs at each product.
Products are `torch._scaled_mm`'s on a GPU that has FP8; a CPU makes the same roundings and multiplies in FP32. Norms,
embeddings, timestep and output projections, text refiner and VAEs are untouched, and AdaLN where one rank alone has it:
there it waits on the host.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group

from shared_runtime.sharding import GatheredLinear, RowParallelLinear, gathered
from shared_schema.deploy.quantization import KEY, LINEARS, MODULATION, takes
from shared_schema.errors import DeployError

logger = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_AMAX = 1e-12
"""A row of zeros still has a scale over zero."""
WIDTH_UNIT = 16
"""Both widths of a weight are multiples of it, or no kernel takes them."""
FIRST_WITH_FP8 = (8, 9)


def check_device(device: torch.device) -> None:
    """Stop before weights are read where FP8 products cannot be made.

    Raises:
        DeployError: a GPU without them.
    """
    if device.type != "cuda":
        logger.warning("fp8: emulated on a CPU, which shows what it does to clips and saves no time")
        return
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < FIRST_WITH_FP8:
        name = torch.cuda.get_device_name(device)
        raise DeployError(
            f"{KEY}: fp8 needs an NVIDIA GPU of compute capability 8.9 or later, not {name}: leave it out"
        )


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values `(n, width)`, and the FP32 scale `(n, 1)` that gives each row back."""
    scale = rows.abs().amax(dim=-1, keepdim=True).float().clamp(min=SMALLEST_AMAX) / LARGEST
    return (rows / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def product(
    rows: torch.Tensor, row_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`(n, in)` and a weight `(out, in)`, both FP8, to `(n, out)`; scales are `(n, 1)` and `(out, 1)`."""
    if rows.device.type == "cuda":
        # Row-wise scales come with BF16 results alone.
        made: torch.Tensor = torch._scaled_mm(
            rows, weight.t(), row_scale, weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return made.to(dtype)
    return (rows.float() @ weight.float().t() * row_scale * weight_scale.t()).to(dtype)


class Fp8Linear(nn.Module):
    """A linear without bias whose weight is FP8."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """`weight` is `(out, in)`, `scale` `(out, 1)`; over a `group` partial products are summed in FP32."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.group = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)`."""
        rows, row_scale = quantized(input.reshape(-1, input.shape[-1]))
        made = product(rows, row_scale, self.weight, self.scale, input.dtype)
        if self.group is not None:
            made = _summed(made, self.group.group_name)
        return made.view(*input.shape[:-1], -1)


class Fp8Projection(Fp8Linear):
    """One with a bias, whose parts are gathered over a `group`: an AdaLN projection, or the condition's."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, group: dist.ProcessGroup | None
    ) -> None:
        """`bias` is `(out,)`."""
        super().__init__(weight, scale)
        self.bias = nn.Parameter(bias, requires_grad=False)
        self._gathering = group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)`."""
        part = super().forward(input) + self.bias
        return part if self._gathering is None else gathered(part, self._gathering)


@torch.library.custom_op("minimax_h3::summed", mutates_args=())
def _summed(partial: torch.Tensor, group: str) -> torch.Tensor:
    """One node for torch.compile; the group goes by torch's own name for it."""
    summed = partial.to(torch.float32, copy=True)
    dist.all_reduce(summed, group=_resolve_process_group(group))  # type: ignore[arg-type]
    return summed.to(partial.dtype, copy=True)


@_summed.register_fake
def _shape(partial: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(partial)


def joined(linears: tuple[Fp8Linear, ...]) -> Fp8Linear:
    """One whose output is theirs, one after another."""
    # Bytes: not every device joins FP8 tensors.
    weight = torch.cat([each.weight.view(torch.uint8) for each in linears]).view(FP8)
    return Fp8Linear(weight, torch.cat([each.scale for each in linears]))


class Quantizer:
    """Quantizes a partition's weights one by one as they arrive, so that they are never all there in BF16."""

    def __init__(self, ignored: tuple[str, ...], *, modulation: bool = False) -> None:
        """`ignored`: parts of names, `attn.to_out` or `transformer_blocks.0`, in which `*` stands for anything.

        `modulation`: AdaLN's projections as well.
        """
        self._ignored = ignored
        self._linears = (*LINEARS, MODULATION) if modulation else LINEARS
        self._scales: dict[str, torch.Tensor] = {}

    def place(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What the module keeps of a weight, on the same device; see `shared_runtime.weights.Place`."""
        module = name.removesuffix(".weight")
        if not takes(module, self._ignored, self._linears):
            return weight
        kept, self._scales[module] = quantized(weight)
        return kept

    def fit(self, transformer: Any) -> None:
        """Make the linears whose weights were quantized compute with them.

        Raises:
            DeployError: a width is not a multiple of 16, or a scale is no scale.
        """
        could = sum(takes(name, (), self._linears) for name, _ in transformer.named_modules())
        for module, scale in self._scales.items():
            linear = transformer.get_submodule(module)
            for width in linear.weight.shape:
                if width % WIDTH_UNIT:
                    raise DeployError(
                        f"{KEY}: {module} is {width} wide on a rank, no multiple of {WIDTH_UNIT}: ignore it"
                    )
            transformer.set_submodule(module, _fitted(linear, scale))
        check_scales(transformer)
        logger.info("fp8: %d linears quantized, %d left as they are", len(self._scales), could - len(self._scales))
        self._scales = {}


def _fitted(linear: Any, scale: torch.Tensor) -> Fp8Linear:
    """What computes in the place of a linear that holds FP8 already."""
    weight = linear.weight.detach()
    if linear.bias is not None:
        group = linear.group if isinstance(linear, GatheredLinear) else None
        return Fp8Projection(weight, scale, linear.bias.detach(), group)
    return Fp8Linear(weight, scale, linear.group if isinstance(linear, RowParallelLinear) else None)


def check_scales(transformer: Any) -> None:
    """Before the first forward: a scale that is no positive number makes noise of every clip, and no error.

    Raises:
        DeployError: such a scale; its layer is named.
    """
    for name, module in transformer.named_modules():
        if isinstance(module, Fp8Linear) and not bool((module.scale.isfinite() & (module.scale > 0)).all()):
            raise DeployError(
                f"{KEY}: a scale of {name} is not finite and positive: its weights are not, or are damaged"
            )
