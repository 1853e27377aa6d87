"""The DiT's tensor-parallel plan: heads, MLP channels and AdaLN tables are dealt out. Runs in diffusion ranks."""

from typing import Any

from shared_runtime.ranks.comm import RankComm
from shared_runtime.sharding import Cut, ShardPlan

DIT_PLAN: ShardPlan = {
    "*.attn.to_[qkv]": Cut.COLUMN,
    "*.attn.to_out.0": Cut.ROW,
    "*.ff.net.0.proj": Cut.FUSED,
    "*.ff.net.2": Cut.ROW,
    "transformer_blocks.*.adaln_proj.linear": Cut.GATHERED,
}
"""Both block stacks. AdaLN is cut because it is 13 of 33 billion parameters; its outputs are small and gathered."""


def use_local_heads(transformer: Any, comm: RankComm) -> None:
    """Tell every attention how many heads its cut projections make; diffusers' model counts them itself."""
    for module in transformer.modules():
        if hasattr(module, "to_q") and hasattr(module, "heads"):
            module.heads //= comm.size("tp")
