"""Norm and rotation of queries and keys in one pass over memory: a Triton kernel. Diffusion ranks; torch.

Its eager twin, against which it is tested, is `attention.norm_and_rotate`.

What torch.compile makes of diffusers' `rotate_half` reads and writes queries and keys five times, 0.26 of the 0.38 s
that an H200 spends outside attention and products in a forward of 124 frames. Imported on GPUs alone: torch for CPUs
comes without Triton.
"""

import torch
import triton
import triton.language as tl

HEADS_AT_ONCE = 8


@triton.jit
def _one(
    source,
    target,
    weight,
    cosines,
    sines,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All heads of one row: `source` and `target` point at its first value."""
    place = tl.arange(0, DIM)
    half = TURNED // 2
    partner = tl.where(place < half, place + half, tl.where(place < TURNED, place - half, place))
    gain = tl.load(weight + place).to(tl.float32) * cosines
    partner_gain = tl.load(weight + partner).to(tl.float32) * sines
    for first in tl.static_range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        inside = (head < HEADS) & (place[None, :] < DIM)
        values = tl.load(source + head * DIM + place[None, :], mask=inside, other=0.0).to(tl.float32)
        partners = tl.load(source + head * DIM + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=1) / DIM + eps)[:, None]
        made = scale * (values * gain[None, :] + partners * partner_gain[None, :])
        tl.store(target + head * DIM + place[None, :], made.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _both(
    qkv,
    query,
    key,
    query_weight,
    key_weight,
    cosine,
    sine,
    row_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, DIM)
    is_turned = place < TURNED
    cosines = tl.load(cosine + row * TURNED + place, mask=is_turned, other=1.0).to(tl.float32)
    sines = tl.load(sine + row * TURNED + place, mask=is_turned, other=0.0).to(tl.float32)
    sines = tl.where(place < TURNED // 2, -sines, sines)
    source, target = qkv + row * row_stride, row * HEADS * DIM
    _one(source, query + target, query_weight, cosines, sines, eps, HEADS, DIM, TURNED, BLOCK)
    _one(source + HEADS * DIM, key + target, key_weight, cosines, sines, eps, HEADS, DIM, TURNED, BLOCK)


def launch(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys `(1, rows, heads, dim)`, normalised and rotated, out of `(1, rows, 3 x heads x dim)`.

    Args:
        qkv: the joined projection's output; its last dimension is contiguous.
        query_weight: of the RMS norm of queries, `(dim,)`.
        key_weight: of the RMS norm of keys.
        cosine: `(rows, turned)`, contiguous; channels from `turned` on only pass.
        sine: like `cosine`.
        heads: of this rank.
        eps: of both norms.
    """
    rows, dim = qkv.shape[1], len(query_weight)
    query, key = (qkv.new_empty(1, rows, heads, dim) for _ in range(2))
    _both[(rows,)](
        qkv,
        query,
        key,
        query_weight,
        key_weight,
        cosine,
        sine,
        qkv.stride(1),
        eps,
        HEADS=heads,
        DIM=dim,
        TURNED=cosine.shape[-1],
        BLOCK=HEADS_AT_ONCE,
    )
    return query, key


norm_and_rotate = torch.library.custom_op("minimax_h3::norm_and_rotate", launch, mutates_args=(), device_types="cuda")
"""`launch` as one node for torch.compile."""


@norm_and_rotate.register_fake
def _shapes(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, qkv.shape[1], heads, query_weight.shape[0])
    return qkv.new_empty(shape), qkv.new_empty(shape)
