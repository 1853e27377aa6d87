"""The row of `benchmarks.encode` about the text tower: the 50 layers that are run, beside stock's 64, in BF16.

Both are one set of weights: stock's model is measured, then cut as `shared_runtime.weights` cuts it, and on a GPU made
fast as an encoder rank does it.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.device import Device, relative_error
from benchmarks.encode_visual import Budget
from benchmarks.kernels import kernel_times
from encoder_service.text import compile_layers
from encoder_service.vision import batch_vision
from shared_runtime.stored import TEXT_LAYERS
from shared_runtime.weights import load_processor, load_tokenizer


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
    return figures
