"""Repeated blocks, compiled once for every size. Torch.

Regional: one graph serves all blocks of a stack, and lengths are symbols in it, so that another size of clip does not
compile again. Runs in diffusion ranks.
"""

from collections.abc import Iterable

from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile the forward of every block, when it is first called; a graph break is an error."""
    for block in blocks:
        block.compile(fullgraph=True, dynamic=True, backend=backend)
