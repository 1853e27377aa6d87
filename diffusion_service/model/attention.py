"""Which kernel computes the DiT's attention: chosen once at start, the same for every block. Diffusion ranks; torch.

    FLASH_ATTN  FlashAttention-3 of the package `fa3-fwd` (extra `fa3`): Hopper, BF16
    CUDNN_ATTN  cuDNN's, through torch: NVIDIA GPUs
    TORCH_SDPA  whatever torch chooses

What the deploy file names is used or stops the start; only where it names nothing is there a choice.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention, _apply_rotary_emb
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from diffusion_service.model.quantize import Fp8Linear, joined
from shared_schema.deploy.model import AttentionBackend
from shared_schema.errors import DeployError

logger = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Query, key, value `(1, rows, heads, dim)` to the same; rows and heads of all three agree."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of every row, `(rows, turned channels)`."""
NormAndRotate = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float],
    tuple[torch.Tensor, torch.Tensor],
]
"""The joined projection's output `(1, rows, 3 x heads x dim)`, the norms' weights, cosine, sine, heads and epsilon to
queries and keys `(1, rows, heads, dim)`."""

HOPPER = (9, 0)
_FA3_MODULE = "fa3_fwd_interface"


def choose(named: AttentionBackend | None, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend of every block; logged.

    Args:
        named: what the deploy file says.
        device: of the rank.
        dtype: that queries, keys and values have.

    Raises:
        DeployError: the one that is named cannot run here.
    """
    chosen, why = (named, "named") if named is not None else _best(device, dtype)
    if named is not None and (reason := unusable(named, device, dtype)) is not None:
        raise DeployError(f"stages[1].diffusion_attention_backend: {named} cannot be used: {reason}")
    logger.info("attention: %s (%s)", chosen, why)
    return chosen


def _best(device: torch.device, dtype: torch.dtype) -> tuple[AttentionBackend, str]:
    reason = unusable("FLASH_ATTN", device, dtype)
    if reason is None:
        return "FLASH_ATTN", "the fastest here"
    if unusable("CUDNN_ATTN", device, dtype) is None:
        return "CUDNN_ATTN", f"FLASH_ATTN: {reason}"
    return "TORCH_SDPA", "no GPU kernel applies"


def unusable(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run here; None if it can. Loads the kernel's package where the hardware fits."""
    if backend == "TORCH_SDPA":
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return "it needs an NVIDIA GPU"
    if backend == "CUDNN_ATTN":
        halves = dtype in (torch.bfloat16, torch.float16)
        return None if halves and torch.backends.cudnn.enabled else "it needs cuDNN and BF16 or FP16"
    if torch.cuda.get_device_capability(device) != HOPPER:
        return f"FlashAttention-3 needs a Hopper GPU, not {torch.cuda.get_device_name(device)}"
    if dtype is not torch.bfloat16:
        return f"FlashAttention-3 is built for BF16, and the blocks are {dtype}"
    try:
        import_module(_FA3_MODULE)
    except ImportError as error:
        return f"package fa3-fwd does not load ({error}): pip install fa3-fwd"
    return None


def attend_with(backend: AttentionBackend) -> Attend:
    """The kernel itself."""
    return {"FLASH_ATTN": _fa3, "CUDNN_ATTN": _cudnn, "TORCH_SDPA": _torch}[backend]


def _torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _torch(query, key, value)


def _fa3(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # A custom op with a fake twin, which torch.compile sees as one node.
    made: torch.Tensor = torch.ops.fa3_fwd._flash_attn_forward(
        query, key, value, softmax_scale=query.shape[-1] ** -0.5
    )[0]
    return made


class DitAttention:
    """diffusers' `MiniMaxH3AttnProcessor` over one kernel, without its registry of backends in the way."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: Angles | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(1, rows, hidden)` to the same; `rotary_emb` is of these rows, or None in the refiner."""
        assert attention_mask is None
        query, key, value = (
            project(hidden_states).unflatten(-1, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)
        return _leave(attn, self._attend(query, key, value))


class JoinedAttention:
    """The same over one product for query, key and value, and one pass for norm and rotation."""

    def __init__(self, attend: Attend, norm_and_rotate: NormAndRotate) -> None:
        self._attend = attend
        self._norm_and_rotate = norm_and_rotate

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: Angles,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`(1, rows, hidden)` to the same; `rotary_emb` is of these rows."""
        assert attention_mask is None
        qkv = attn.to_qkv(hidden_states)
        query, key = self._norm_and_rotate(
            qkv, attn.norm_q.weight, attn.norm_k.weight, *rotary_emb, attn.heads, attn.norm_q.eps
        )
        value = qkv.chunk(3, dim=-1)[2].unflatten(-1, (attn.heads, -1))
        return _leave(attn, self._attend(query, key, value))


def _leave(attn: MiniMaxH3Attention, product: torch.Tensor) -> torch.Tensor:
    joined: torch.Tensor = attn.to_out[1](attn.to_out[0](product.flatten(2, 3)))
    return joined


def use_attention(model: nn.Module, attend: Attend) -> None:
    """Give every block of a transformer, refiner included, or of one of its stacks, `attend` for its kernel."""
    for module in model.modules():
        if isinstance(module, MiniMaxH3Attention):
            module.set_processor(DitAttention(attend))


def join_qkv(transformer: Any, attend: Attend, norm_and_rotate: NormAndRotate) -> None:
    """Make query, key and value of every block one product; the three weights become one and go."""
    for block in transformer.transformer_blocks:
        attention = block.attn
        attention.to_qkv = _joined(attention.to_q, attention.to_k, attention.to_v)
        attention.fused_projections = True
        attention.set_processor(JoinedAttention(attend, norm_and_rotate))
        del attention.to_q, attention.to_k, attention.to_v


def _joined(*linears: nn.Linear | Fp8Linear) -> nn.Linear | Fp8Linear:
    """One linear whose output is theirs, one after another; they have no bias, and are all FP8 or none is."""
    quantized = tuple(each for each in linears if isinstance(each, Fp8Linear))
    if quantized:
        assert len(quantized) == len(linears)
        return joined(quantized)
    return _joined_plain(*(each for each in linears if isinstance(each, nn.Linear)))


def _joined_plain(*linears: nn.Linear) -> nn.Linear:
    assert all(each.bias is None for each in linears)
    weight = torch.cat([each.weight for each in linears])
    joined = nn.Linear(linears[0].in_features, len(weight), bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    return joined


def norm_and_rotate(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A `NormAndRotate` in diffusers' own steps."""
    query, key, _ = qkv.view(*qkv.shape[:2], 3, heads, -1).unbind(2)
    return (
        _apply_rotary_emb(rms_norm(query, query_weight.shape, query_weight, eps), cosine, sine),
        _apply_rotary_emb(rms_norm(key, key_weight.shape, key_weight, eps), cosine, sine),
    )


def norm_and_rotate_in_one_pass() -> NormAndRotate:
    """The `NormAndRotate` for NVIDIA GPUs."""
    kernel: NormAndRotate = import_module("diffusion_service.model.qk_kernel").norm_and_rotate
    return kernel
