"""The video VAE's encoder for batches of tiles on a GPU. Torch.

It is diffusers' `MiniMaxH3VideoEncoder3d` written for a compiler: norm, activation, padding and the cut into pieces
stand between two convolutions as plain expressions, so that they become one kernel that reads and writes memory once.
A single frame is encoded by 2-D convolutions: the two frames before it are the causal padding's zeros, so that of a
kernel's three slices in time only the last one meets values.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from shared_runtime.conditioning.split import SplitConvolution
from shared_runtime.conditioning.ways import Layout, Way


class TileModel(nn.Module):
    """Moments of a batch of tiles of one shape."""

    def __init__(self, vae: Any, way: Callable[[str], Way], layout: Layout, *, flat: bool) -> None:
        """`vae` is the encoder half; `way` says how the layer of a name is computed; `flat`: for single frames."""
        super().__init__()
        last = torch.channels_last if flat else torch.channels_last_3d
        self.layout = torch.contiguous_format if layout == "contiguous" else last
        self._flat = flat
        names = {id(module): name for name, module in vae.encoder.named_modules()}

        def layer(stock: nn.Conv3d, after: tuple[int, ...] = (0, 0, 0, 0)) -> Layer:
            name = names.get(id(stock), "quant_conv")
            return Layer(name, stock, way(name), after, self.layout, flat=flat)

        encoder = vae.encoder
        self.first = layer(encoder.conv_in)
        stages: list[nn.Module] = []
        for block in encoder.down_blocks:
            stages += [_Resnet(resnet, layer) for resnet in block.resnets]
            stages += [_down(each, layer) for each in block.downsamplers or ()]
        self.stages = nn.ModuleList(stages)
        self.norm = encoder.norm_out
        self.last = layer(encoder.conv_out)
        self.moments = layer(vae.quant_conv)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Moments `(n, 48, t, h, w)` of tiles `(n, 3, frames, height, width)`."""
        values = pixels[:, :, 0] if self._flat else pixels
        values = self.first(values)
        for stage in self.stages:
            values = stage(values)
        moments: torch.Tensor = self.moments(self.last(_active(values, self.norm)))
        return moments[:, :, None] if self._flat else moments


class Layer(nn.Module):
    """A causal convolution with its padding and bias."""

    bias: torch.Tensor

    def __init__(
        self,
        name: str,
        stock: nn.Conv3d,
        way: Way,
        after: tuple[int, ...],
        layout: torch.memory_format,
        *,
        flat: bool,
    ) -> None:
        """`after`: pixels that are padded on the left, right, top and bottom before the layer's own padding."""
        super().__init__()
        self.name = name
        own = getattr(stock, "spatial_padding", 0)
        self._padding = tuple(own + each for each in after)
        self._mode = getattr(stock, "spatial_padding_mode", "reflect")
        self._before = 0 if flat else getattr(stock, "temporal_padding", 0)
        self.layout = layout
        weight = stock.weight.detach()
        self.products = SplitConvolution(
            weight[:, :, -1] if flat else weight, stock.stride[1:] if flat else stock.stride, way, layout
        )
        assert stock.bias is not None
        self.register_buffer("bias", stock.bias.detach().view(-1, *(1,) * (2 if flat else 3)), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Padded, multiplied, and the bias added."""
        in_time = () if values.ndim == 4 else (0, 0)
        if any(self._padding):
            values = functional.pad(values, (*self._padding, *in_time), mode=self._mode)
        if self._before:
            values = functional.pad(values, (0, 0, 0, 0, self._before, 0))
        made: torch.Tensor = self.products(values.contiguous(memory_format=self.layout)) + self.bias
        return made


class _Resnet(nn.Module):
    def __init__(self, stock: Any, layer: Callable[[nn.Conv3d], Layer]) -> None:
        super().__init__()
        self.norm1, self.conv1 = stock.norm1, layer(stock.conv1)
        self.norm2, self.conv2 = stock.norm2, layer(stock.conv2)
        self.shortcut = nn.Identity() if stock.conv_shortcut is None else layer(stock.conv_shortcut)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made = self.conv1(_active(values, self.norm1))
        made = self.conv2(_active(made, self.norm2))
        whole: torch.Tensor = self.shortcut(values) + made
        return whole


def _down(stock: Any, layer: Callable[[nn.Conv3d, tuple[int, ...]], Layer]) -> Layer:
    """A halving of the sides pads on the right and at the bottom."""
    return layer(stock.conv, (0, 1, 0, 1) if stock.spatial_stride == 2 else (0, 0, 0, 0))


def _active(values: torch.Tensor, norm: nn.GroupNorm) -> torch.Tensor:
    """Group norm of every frame by itself, then SiLU."""
    count, channels, *sizes = values.shape
    grouped = values.reshape(count, norm.num_groups, channels // norm.num_groups, *sizes)
    variance, mean = torch.var_mean(grouped, dim=(2, -2, -1), correction=0, keepdim=True)
    normed = ((grouped - mean) * torch.rsqrt(variance + norm.eps)).flatten(1, 2)
    shape = (-1, *(1,) * (values.ndim - 2))
    return functional.silu(normed * norm.weight.view(shape) + norm.bias.view(shape))
