"""Products of TF32 pieces are FP32 products but for rounding; products of operands rounded to TF32 are not."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as functional

from shared_runtime.conditioning.split import SplitConvolution, pieces, rounded
from shared_runtime.conditioning.ways import Way
from shared_runtime.tensor_float import tensor_float

SPLIT: list[Way] = [way for way in get_args(Way) if way not in ("fp32", "tf32")]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def error(way: Way, pixels: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...]) -> float:
    """Relative to the products in FP64."""
    flat = pixels.ndim == 4
    stock = functional.conv2d if flat else functional.conv3d
    exact = stock(pixels.double(), weight.double(), None, list(stride))
    made = SplitConvolution(weight, stride, way, torch.contiguous_format)(pixels)
    return float((made - exact).norm() / exact.norm())


def test_a_piece_has_eleven_significant_bits() -> None:
    values = normal(4096) * torch.logspace(-30, 30, 4096)
    high, low = pieces(values)
    for piece in (high, low):
        mantissa, _ = torch.frexp(piece)
        assert torch.equal(mantissa * 2**11, (mantissa * 2**11).round())
    assert ((high - values).abs() <= values.abs() * 2**-11).all()
    assert ((high.double() + low.double() - values.double()).abs() <= values.double().abs() * 2**-22).all()


@pytest.mark.parametrize("allowed", [True, False])
def test_the_processs_setting_is_put_back(allowed: bool) -> None:
    convolution = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolution.fp32_precision
    with tensor_float(allowed):
        assert convolution.fp32_precision == ("tf32" if allowed else "ieee")
        SplitConvolution(normal(2, 2, 3, 3), (1, 1), "split", torch.contiguous_format)(normal(1, 2, 8, 8))
        assert convolution.fp32_precision == ("tf32" if allowed else "ieee")
    assert convolution.fp32_precision == before


def test_what_is_half_way_goes_away_from_zero() -> None:
    assert rounded(torch.tensor([1 + 2**-11, -1 - 2**-11, 1 + 2**-12])).tolist() == [1 + 2**-10, -1 - 2**-10, 1]


def test_what_is_no_number_stays_none() -> None:
    """Also a NaN whose bits are all set, as a GPU makes them."""
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32)
    high, low = pieces(bits.view(torch.float32))
    assert (high + low).isnan().all()
    assert (sum(pieces(torch.tensor([float("inf"), -float("inf")])))).isnan().all()


@pytest.mark.parametrize(("frames", "stride"), [((), (1, 1)), ((5,), (1, 1, 1)), ((5,), (2, 2, 2)), ((), (2, 2))])
@pytest.mark.parametrize("way", SPLIT)
def test_split_products_are_as_exact_as_fp32(way: Way, frames: tuple[int], stride: tuple[int, ...]) -> None:
    """On a GPU, where sums within a tensor core are rounded more coarsely, 3e-6 to 2e-5 were measured."""
    kernel = (3,) * len(stride)
    pixels, weight = normal(2, 64, *frames, 12, 10), normal(32, 64, *kernel)
    assert error("fp32", pixels, weight, stride) < 3e-6
    assert error(way, pixels, weight, stride) < 3e-6
    assert 1e-4 < error("tf32", pixels, weight, stride) < 2e-3


@pytest.mark.parametrize("way", SPLIT)
def test_fewer_channels_than_parts_are_as_many_parts(way: Way) -> None:
    assert error(way, normal(1, 3, 8, 8), normal(4, 3, 3, 3), (1, 1)) < 3e-6


@pytest.mark.parametrize("way", SPLIT)
def test_pixels_beside_each_other_in_memory_are_multiplied_so(way: Way) -> None:
    pixels, weight = normal(2, 8, 3, 8, 8), normal(4, 8, 3, 3, 3)
    plain = SplitConvolution(weight, (1, 1, 1), way, torch.contiguous_format)(pixels)
    last = SplitConvolution(weight, (1, 1, 1), way, torch.channels_last_3d)
    made = last(pixels.contiguous(memory_format=torch.channels_last_3d))
    assert made.is_contiguous(memory_format=torch.channels_last_3d)
    assert float((made - plain).norm() / plain.norm()) < 3e-6
