"""The row of `benchmarks.encode` about the text tower: the 50 layers that are run, beside stock's 64, in BF16.

Both are one set of weights: stock's model is measured, then cut as `shared_runtime.weights` cuts it, and on a GPU made
fast as an encoder rank does it. `ours_fa3` is the same with FlashAttention-3 in the place of torch's choice of kernel.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.device import Device, relative_error
from benchmarks.encode_visual import Budget
from benchmarks.kernels import kernel_times
from diffusion_service.model.attention import unusable
from encoder_service.text import compile_layers
from encoder_service.vision import batch_vision
from shared_runtime.stored import TEXT_LAYERS
from shared_runtime.weights import load_processor, load_tokenizer

FA3 = "benchmark_fa3"


def fa3(
    _module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """As transformers calls a kernel: `(1, heads, tokens, width)` to `(1, tokens, heads, width)`, causal."""
    assert mask is None
    rows = (each.transpose(1, 2) for each in (query, key, value))
    made = torch.ops.fa3_fwd._flash_attn_forward(*rows, softmax_scale=given["scaling"], causal=True)
    return made[0], None


def use_fa3(model: Any) -> None:
    """Have the tower's layers attend with it; nothing is padded, so that there is no mask."""
    ALL_ATTENTION_FUNCTIONS.register(FA3, fa3)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FA3, flash_attention_mask)
    model.model.language_model.config._attn_implementation = FA3


def text_row(device: Device, folder: Path, tokens: int, budget: Budget, *, profiled: bool) -> dict[str, Any]:
    """Stock as diffusers' block calls it, then ours."""
    config = Qwen3VLConfig.from_pretrained(folder / "text_encoder", local_files_only=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device.torch_device:
            model = Qwen3VLForConditionalGeneration(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    processor = load_processor(folder)
    words = load_tokenizer(folder)("a lighthouse at dusk, waves below ", add_special_tokens=False)["input_ids"]
    ids = (words * (tokens // len(words) + 1))[:tokens]
    made: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def encode(name: str) -> None:
        made[name] = get_qwen3vl_prompt_embeds(
            model, processor, ids, {}, TEXT_LAYERS, device.torch_device, torch.bfloat16
        )

    def measured(name: str) -> dict[str, Any]:
        device.reset_peak()
        return {**budget.measure(device, lambda: encode(name)), **device.memory()}

    figures: dict[str, Any] = {"tokens": tokens, "stock_layers": config.text_config.num_hidden_layers}
    figures["stock_bf16"] = measured("stock")
    language = model.model.language_model
    language.layers, language.norm = language.layers[:TEXT_LAYERS], nn.Identity()
    if device.is_gpu:
        batch_vision(model)
        compile_layers(model)
    figures["ours"] = measured("ours")
    figures["ours"]["of_stock"] = round(figures["ours"]["s"] / figures["stock_bf16"]["s"], 4)
    figures["ours"]["error"] = relative_error(made["ours"].float(), made["stock"].float())
    if profiled:
        figures["ours"]["kernels"] = kernel_times(lambda: encode("ours"))
    if unusable("FLASH_ATTN", device.torch_device, torch.bfloat16) is None:
        use_fa3(model)
        figures["ours_fa3"] = measured("fa3")
        figures["ours_fa3"]["of_ours"] = round(figures["ours_fa3"]["s"] / figures["ours"]["s"], 4)
        figures["ours_fa3"]["error"] = relative_error(made["fa3"].float(), made["stock"].float())
    return figures
