"""The demo checkpoint's modules: the released classes and geometry, as small as they can be and still learn. Torch."""

import warnings
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from shared_runtime.tiny import special_id
from training import words

CANVAS_SHORT_EDGE, CANVAS_MAX_PIXELS = 64, 64 * 96
"""So that 16:9 is 64x96, 9:16 is 96x64, and 1:1 is 64x64."""
FRAMES, HEIGHT, WIDTH = 107, 64, 96
"""What is trained on: the shortest clip, on the widest canvas."""

TEXT_DIM = 64
_LAYERS, _HEADS, _HEAD_DIM, _TEXT_FFN = 52, 2, 16, 32
_VISION_HIDDEN, _VISION_DEPTH = 32, 3
_SPREAD, _MIXED = 0.5, 0.01
"""Spread of the embeddings, and of what a layer adds to them: after 50 layers a word is still itself, and no less
what stands before it."""


def text_config() -> Qwen3VLConfig:
    """Of the text encoder. Its 50th hidden state is what the model reads, so it has 52 layers; two are never run."""
    common = {"dtype": "bfloat16"}
    text = {
        **common,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": TEXT_DIM,
        "intermediate_size": _TEXT_FFN,
        "max_position_embeddings": 262144,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "rope_theta": 5000000.0,
            "rope_type": "default",
        },
        "vocab_size": words.size(),
    }
    vision = {
        **common,
        "deepstack_visual_indexes": list(range(_VISION_DEPTH)),
        "depth": _VISION_DEPTH,
        "hidden_size": _VISION_HIDDEN,
        "intermediate_size": 2 * _VISION_HIDDEN,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": TEXT_DIM,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=special_id("<|image_pad|>", words.plain()),
        video_token_id=special_id("<|video_pad|>", words.plain()),
        vision_start_token_id=special_id("<|vision_start|>", words.plain()),
        vision_end_token_id=special_id("<|vision_end|>", words.plain()),
        tie_word_embeddings=False,
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="bfloat16",
    )


def text_encoder(seed: int) -> Qwen3VLForConditionalGeneration:
    """The text encoder, in BF16. It is drawn, not trained: words far from each other are all that is asked of it."""
    model = Qwen3VLForConditionalGeneration(text_config())
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            spread = _SPREAD if "embed" in name.rsplit(".", 2)[-2] else weight[0].numel() ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                spread = _MIXED
            weight.copy_(torch.randn(weight.shape, generator=random) * spread)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def transformer() -> MiniMaxH3Transformer3DModel:
    """One partition of the DiT, in FP32 for training."""
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=6,
        attention_head_dim=32,
        hidden_size=192,
        num_layers=7,
        num_refiner_layers=1,
        ffn_dim=384,
        text_dim=TEXT_DIM,
        freq_dim=64,
        time_embed_hidden_dim=128,
        time_embed_dim=32,
        rope_freq_dim=5,
    )


def video_vae() -> AutoencoderKLMiniMaxH3:
    """The video VAE."""
    model = AutoencoderKLMiniMaxH3(
        block_out_channels=(16, 24, 32, 40, 40, 40),
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=4,
        decoder_num_attention_heads=6,
        decoder_attention_head_dim=32,
        decoder_ffn_mult=2,
    )
    with torch.no_grad():
        for name, weight in model.decoder.named_parameters():
            # Zero from the class: the blocks would be identities, and the registers all one.
            if name.endswith(("scale1", "scale2")):
                weight.fill_(0.5)
            elif name == "register_tokens":
                weight.normal_(0, 0.5)
    return model


def audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    """The audio VAE."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`?torch.nn.utils.weight_norm", FutureWarning)
        model = AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            latent_dim=64,
            decoder_dim=256,
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1,),),
            latents_mean=[0.0] * 32,
            latents_std=[1.0] * 32,
        )
    with torch.no_grad():
        for name, weight in model.decoder.named_parameters():
            # So few channels are easily all where their activation is flat: then nothing that is said comes through.
            if name.endswith("bias"):
                weight.zero_()
    return model


def parameters(module: nn.Module) -> int:
    """How many numbers a module has learned."""
    return sum(weight.numel() for weight in module.parameters())


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    """What is stored of a module, on the host."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
