"""Convolutions of FP32 accuracy on units that multiply TensorFloat-32. Torch.

TF32 keeps 11 of FP32's 24 significant bits. A value is split into the nearest TF32 number and the nearest one to what
is left, which together have 22. The product of two values is then three products of pieces, each exact in the sums'
FP32; the fourth, of both remainders, is below its last bit. On a CPU the same code emulates what a GPU makes of it,
up to the order of the sums and the rounding in them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import nn

from shared_runtime.conditioning.ways import Way
from shared_runtime.tensor_float import tensor_float_convolutions

PARTS: dict[Way, int] = {"halved": 2, "quartered": 4}
"""Into how many parts of the channels the product of the high pieces is cut."""
_BELOW = 0x1FFF
"""The bits of an FP32 number that TF32 does not keep."""


def rounded(values: torch.Tensor) -> torch.Tensor:
    """The nearest TF32 numbers, as FP32; what is half way goes away from zero."""
    bits = values.view(torch.int32)
    nearest = ((bits + (_BELOW + 1) // 2) & ~_BELOW).view(torch.float32)
    # The bits of a GPU's NaN are all set: one more, and it would be a zero.
    return torch.where(values.isfinite(), nearest, values)


def pieces(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """TF32 numbers and the TF32 remainder of each."""
    high = rounded(values)
    return high, rounded(values - high)


def _convolve(pixels: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], in_tf32: bool) -> torch.Tensor:
    """A convolution without padding and bias over clips `(n, c, t, h, w)` or pictures `(n, c, h, w)`.

    Pictures in FP32 are clips of one frame: of larger batches cuDNN makes Fourier transforms in 2-D, 25 times slower.
    """
    with tensor_float_convolutions(in_tf32):
        if pixels.ndim == 5:
            return functional.conv3d(pixels, weight, None, list(stride))
        if in_tf32:
            return functional.conv2d(pixels, weight, None, list(stride))
        return functional.conv3d(pixels[:, :, None], weight[:, :, None], None, [1, *stride])[:, :, 0]


convolve = torch.library.custom_op("minimax_h3::convolve", _convolve, mutates_args=())
"""`_convolve` as one node for torch.compile, which could not change the setting within a graph."""


@convolve.register_fake
def _shapes(pixels: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], in_tf32: bool) -> torch.Tensor:
    made = functional.conv2d if pixels.ndim == 4 else functional.conv3d
    return made(pixels, weight, None, list(stride))


class SplitConvolution(nn.Module):
    """The products of one convolution, without padding and bias, its weights cut once."""

    whole: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor

    def __init__(self, weight: torch.Tensor, stride: Sequence[int], way: Way, layout: torch.memory_format) -> None:
        """`weight` is FP32 `(out, in, [t,] h, w)`; `layout` is that of pixels and weights in memory."""
        super().__init__()
        self.way: Way = way
        self._layout = layout
        self.stride = tuple(stride)
        self._parts = min(PARTS.get(way, 1), weight.shape[1])
        for name, piece in self._pieces(weight).items():
            self.register_buffer(name, piece.contiguous(memory_format=layout), persistent=False)

    def _pieces(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        high, low = pieces(weight)
        match self.way:
            case "fp32":
                return {"whole": weight}
            case "tf32":
                return {"whole": high}
            case "stacked":
                return {"whole": torch.cat([high, low, high], dim=1)}
            case _:
                named = {f"part{number}": part for number, part in enumerate(high.chunk(self._parts, dim=1))}
                return {"high": high, "low": low, **(named if self._parts > 1 else {})}

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """What the convolution makes of padded pixels."""
        match self.way:
            case "fp32":
                return self._product(pixels, self.whole, in_tf32=False)
            case "tf32":
                return self._product(rounded(pixels), self.whole)
        high, low = pieces(pixels)
        if self.way == "stacked":
            stacked = torch.cat([high, high, low], dim=1).contiguous(memory_format=self._layout)
            return self._product(stacked, self.whole)
        made = self._product(low, self.high) + self._product(high, self.low)
        if self._parts == 1:
            return made + self._product(high, self.high)
        for number, part in enumerate(high.chunk(self._parts, dim=1)):
            made = made + self._product(part.contiguous(memory_format=self._layout), getattr(self, f"part{number}"))
        return made

    def _product(self, pixels: torch.Tensor, weight: torch.Tensor, *, in_tf32: bool = True) -> torch.Tensor:
        made: torch.Tensor = convolve(pixels, weight, self.stride, in_tf32)
        return made
