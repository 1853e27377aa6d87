"""The DiT's tensor-parallel plan: heads, MLP channels and AdaLN tables are dealt out. Runs in diffusion ranks."""

from typing import Any

from shared_runtime.ranks.comm import RankComm
from shared_runtime.sharding import Cut, ShardPlan
from shared_schema.errors import DeployError

DIT_PLAN: ShardPlan = {
    "*.attn.to_[qkv]": Cut.COLUMN,
    "*.attn.to_out.0": Cut.ROW,
    "*.ff.net.0.proj": Cut.FUSED,
    "*.ff.net.2": Cut.ROW,
    "transformer_blocks.*.adaln_proj.linear": Cut.GATHERED,
}
"""Both block stacks. AdaLN is cut because it is 13 of 33 billion parameters; its outputs are small and gathered."""


def use_local_heads(transformer: Any, comm: RankComm) -> None:
    """Tell every attention how many heads its cut projections make; diffusers' model counts them itself.

    Raises:
        DeployError: the heads do not divide by the ranks: Ulysses deals out what tensor parallelism leaves.
    """
    for name, module in transformer.named_modules():
        if hasattr(module, "to_q") and hasattr(module, "heads"):
            if module.heads % comm.world_size:
                ranks = f"tensor_parallel_size {comm.size('tp')} x ulysses_degree {comm.size('ulysses')}"
                raise DeployError(f"{name} has {module.heads} heads, which do not divide by {ranks}")
            module.heads //= comm.size("tp")
