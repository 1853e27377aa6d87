"""Repeated blocks compiled once for every size, and the passes over memory that a compiler cannot join. Torch.

Regional: one graph serves all blocks of a stack, and lengths are symbols in it, so that another size of clip does not
compile again. Runs in diffusion ranks.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile the forward of every block, when it is first called; a graph break is an error."""
    for block in blocks:
        block.compile(fullgraph=True, dynamic=True, backend=backend)


def fuse_qkv(transformer: Any) -> None:
    """Make query, key and value of every block one product; the three weights become one and go."""
    for block in transformer.transformer_blocks:
        attention = block.attn
        attention.to_qkv = _joined(attention.to_q, attention.to_k, attention.to_v)
        attention.fused_projections = True
        del attention.to_q, attention.to_k, attention.to_v


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One linear whose output is theirs, one after another; they have no bias."""
    assert all(each.bias is None for each in linears)
    weight = torch.cat([each.weight for each in linears])
    joined = nn.Linear(linears[0].in_features, len(weight), bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    return joined
