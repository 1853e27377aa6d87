"""Names, shapes and values of the tiny checkpoint's tensors; runs in any process, without torch.

A value is a small integer times a power of two, and the integer comes from a hash of tensor name and position, so
that every machine and every version of every library writes the same bytes.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
Dtype = Literal["F32", "BF16"]

TEXT_HIDDEN, TEXT_LAYERS, TEXT_HEADS, TEXT_KV_HEADS, TEXT_HEAD_DIM, TEXT_FFN, VOCABULARY = 32, 52, 4, 2, 16, 64, 320
VISION_HIDDEN, VISION_DEPTH, VISION_FFN, VISION_POSITIONS = 32, 3, 64, 64
DIT_HIDDEN, DIT_HEADS, DIT_HEAD_DIM, DIT_LAYERS, DIT_FFN, DIT_TIME, DIT_FREQ = 64, 4, 16, 2, 64, 32, 32
VIDEO_LATENT, VIDEO_CHANNELS, VIDEO_LEVELS, VIDEO_DECODER, VIDEO_DECODER_LAYERS, REGISTERS = 24, 8, 6, 32, 2, 4
AUDIO_LATENT, AUDIO_TRUNK, AUDIO_WIDTH, AUDIO_DECODER = 32, 64, 2, 128
AUDIO_ENCODER_RATES = (2, 4, 4, 5, 5)
AUDIO_DECODER_KERNELS = (9, 9, 4, 4, 4, 4, 4)

_LOWPASS = (17020, 78765, -214274, -483665, 1078545, 3717913)
"""First half of the Kaiser-windowed sinc that the audio decoder resamples with, in units of 2**-23."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file: little-endian bytes of `dtype`, row-major."""

    name: str
    dtype: Dtype
    shape: Shape
    data: bytes


def tensors(component: str, names: Named, dtype: Dtype) -> list[Tensor]:
    """Give every named shape its values. `component` is part of the hash: two partitions differ in every tensor."""
    return [Tensor(name, dtype, shape, _stored(_values(component, name, shape), dtype)) for name, shape in names]


def _stored(values: NDArray[np.float32], dtype: Dtype) -> bytes:
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    # Every value has at most eight significant bits, so cutting the lower half is exact.
    return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()


def _values(component: str, name: str, shape: Shape) -> NDArray[np.float32]:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "filter":
        return np.array([*_LOWPASS, *_LOWPASS[::-1]], np.float32) * np.float32(2**-23)
    if leaf == "zero_k_bias":
        return np.zeros(shape, np.float32)
    low, high, offset, exponent = _spread(component, name, shape)
    integers = _integers(f"{component}/{name}", int(np.prod(shape)), low, high) + offset
    return (integers.astype(np.float32) * np.float32(2.0**exponent)).reshape(shape)


def _spread(component: str, name: str, shape: Shape) -> tuple[int, int, int, int]:
    """Smallest and largest integer, what is added to it, and the power of two it is scaled by."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "weight_g":
        # The last convolution sets the loudness: well over silence, well under full scale.
        return (-16, 15, 64, -10) if "conv_post" in name else (-16, 15, 64, -6)
    if leaf in ("scale1", "scale2"):
        return -32, 31, 64, -7
    if leaf in ("alpha", "beta") and ".act." in name:
        return -16, 15, 0, -6
    if name.endswith(("norm_q.weight", "norm_k.weight", "q_norm.weight", "k_norm.weight")):
        # Sharp attention: a row looks at a few others, so that each of them matters.
        return -32, 31, 128, -6
    if leaf == "alpha" or (leaf == "weight" and len(shape) == 1):
        return -32, 31, 128, -7
    if len(shape) == 1:
        return -16, 15, 0, -7
    if leaf == "register_tokens" or "embed" in name.rsplit(".", 2)[-2]:
        return -128, 127, 0, -7
    fan_in = int(np.prod(shape[1:]))
    return -128, 127, 0, -6 - fan_in.bit_length() // 2 + _emphasis(component, name)


def _emphasis(component: str, name: str) -> int:
    """Binary orders by which a matrix is larger than its fan-in asks for: one word more must change a pixel."""
    if component.startswith("transformer"):
        return 1 if any(part in name for part in ("attn.to_v", "attn.to_out", "ff.net.2", "proj_out")) else 0
    if "language_model.layers" in name and name.endswith(("o_proj.weight", "down_proj.weight")):
        return -2  # 50 layers add up: larger, they would blow rounding up to 1e-5, and no plan could be told from noise
    return 0


def _integers(key: str, count: int, low: int, high: int) -> NDArray[np.int64]:
    """`count` integers from `low` to `high`: the finaliser of SplitMix64 over a counter that starts at a hash."""
    start = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    state = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    top = ((state ^ (state >> np.uint64(31))) >> np.uint64(40)).astype(np.int64)
    scaled: NDArray[np.int64] = (top * (high - low + 1) >> 24) + low
    return scaled


def _linear(name: str, fan_out: int, *fan_in: int, bias: bool = True) -> Named:
    yield f"{name}.weight", (fan_out, *fan_in)
    if bias:
        yield f"{name}.bias", (fan_out,)


def _norm(name: str, width: int, bias: bool = False) -> Named:
    yield from _linear(name, width, bias=bias)


def text_encoder() -> Named:
    """Qwen3-VL: vision tower, decoder stack, head."""
    yield from _vision("model.visual")
    language = "model.language_model"
    yield f"{language}.embed_tokens.weight", (VOCABULARY, TEXT_HIDDEN)
    for layer in range(TEXT_LAYERS):
        yield from _text_layer(f"{language}.layers.{layer}")
    yield from _norm(f"{language}.norm", TEXT_HIDDEN)
    yield "lm_head.weight", (VOCABULARY, TEXT_HIDDEN)


def _text_layer(layer: str) -> Named:
    queries, keys = TEXT_HEADS * TEXT_HEAD_DIM, TEXT_KV_HEADS * TEXT_HEAD_DIM
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear(f"{layer}.self_attn.{name}_proj", rows, TEXT_HIDDEN, bias=False)
    yield from _linear(f"{layer}.self_attn.o_proj", TEXT_HIDDEN, queries, bias=False)
    for name in ("q_norm", "k_norm"):
        yield from _norm(f"{layer}.self_attn.{name}", TEXT_HEAD_DIM)
    for name in ("gate_proj", "up_proj"):
        yield from _linear(f"{layer}.mlp.{name}", TEXT_FFN, TEXT_HIDDEN, bias=False)
    yield from _linear(f"{layer}.mlp.down_proj", TEXT_HIDDEN, TEXT_FFN, bias=False)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from _norm(f"{layer}.{name}", TEXT_HIDDEN)


def _vision(visual: str) -> Named:
    merged = 4 * VISION_HIDDEN
    yield from _linear(f"{visual}.patch_embed.proj", VISION_HIDDEN, 3, 2, 16, 16)
    yield f"{visual}.pos_embed.weight", (VISION_POSITIONS, VISION_HIDDEN)
    for depth in range(VISION_DEPTH):
        block = f"{visual}.blocks.{depth}"
        for name in ("norm1", "norm2"):
            yield from _norm(f"{block}.{name}", VISION_HIDDEN, bias=True)
        yield from _linear(f"{block}.attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN)
        yield from _linear(f"{block}.attn.proj", VISION_HIDDEN, VISION_HIDDEN)
        yield from _linear(f"{block}.mlp.linear_fc1", VISION_FFN, VISION_HIDDEN)
        yield from _linear(f"{block}.mlp.linear_fc2", VISION_HIDDEN, VISION_FFN)
    mergers = [("merger", VISION_HIDDEN), *((f"deepstack_merger_list.{i}", merged) for i in range(VISION_DEPTH))]
    for name, width in mergers:
        yield from _norm(f"{visual}.{name}.norm", width, bias=True)
        yield from _linear(f"{visual}.{name}.linear_fc1", merged, merged)
        yield from _linear(f"{visual}.{name}.linear_fc2", TEXT_HIDDEN, merged)


def transformer() -> Named:
    """The DiT; both partitions have these names."""
    patch = VIDEO_LATENT * 4
    yield from _linear("proj_in", DIT_HIDDEN, patch)
    yield from _linear("audio_proj_in", DIT_HIDDEN, AUDIO_LATENT)
    yield from _linear("context_embedder", DIT_HIDDEN, TEXT_HIDDEN)
    yield from _linear("time_embedder.linear_1", DIT_HIDDEN, DIT_FREQ)
    yield from _linear("time_embedder.linear_2", DIT_TIME, DIT_HIDDEN)
    yield from _dit_block("token_refiner.refiner_blocks.0")
    yield from _norm("token_refiner.final_norm", DIT_HIDDEN)
    for layer in range(DIT_LAYERS):
        yield from _dit_block(f"transformer_blocks.{layer}")
        yield from _linear(f"transformer_blocks.{layer}.adaln_proj.linear", 18 * DIT_HIDDEN, DIT_TIME)
    yield from _norm("norm_out.norm", DIT_HIDDEN)
    yield from _linear("norm_out.linear", 2 * DIT_HIDDEN, DIT_TIME)
    yield from _linear("proj_out", patch, DIT_HIDDEN)
    yield from _linear("audio_proj_out", AUDIO_LATENT, DIT_HIDDEN)


def _dit_block(block: str) -> Named:
    inner = DIT_HEADS * DIT_HEAD_DIM
    for name in ("norm1", "norm2"):
        yield from _norm(f"{block}.{name}", DIT_HIDDEN)
    for name in ("to_q", "to_k", "to_v"):
        yield from _linear(f"{block}.attn.{name}", inner, DIT_HIDDEN, bias=False)
    for name in ("norm_q", "norm_k"):
        yield from _norm(f"{block}.attn.{name}", DIT_HEAD_DIM)
    yield from _linear(f"{block}.attn.to_out.0", DIT_HIDDEN, inner, bias=False)
    yield from _linear(f"{block}.ff.net.0.proj", 2 * DIT_FFN, DIT_HIDDEN, bias=False)
    yield from _linear(f"{block}.ff.net.2", DIT_HIDDEN, DIT_FFN, bias=False)


def video_vae() -> Named:
    """The video VAE: convolutional encoder, ViT decoder."""
    channels, cube = VIDEO_CHANNELS, (3, 3, 3)
    yield from _linear("encoder.conv_in", channels, 3, *cube)
    for level in range(VIDEO_LEVELS):
        block = f"encoder.down_blocks.{level}"
        for i in (1, 2):
            yield from _norm(f"{block}.resnets.0.norm{i}", channels, bias=True)
            yield from _linear(f"{block}.resnets.0.conv{i}", channels, channels, *cube)
        if level < 4:
            yield from _linear(f"{block}.downsamplers.0.conv", channels, channels, *cube)
    yield from _norm("encoder.norm_out", channels, bias=True)
    yield from _linear("encoder.conv_out", 2 * VIDEO_LATENT, channels, *cube)
    yield from _linear("quant_conv", 2 * VIDEO_LATENT, 2 * VIDEO_LATENT, 1, 1, 1)
    yield from _linear("post_quant_conv", VIDEO_LATENT, VIDEO_LATENT, 1, 1, 1)
    yield from _video_decoder("decoder", VIDEO_DECODER)


def _video_decoder(decoder: str, width: int) -> Named:
    yield f"{decoder}.register_tokens", (1, REGISTERS, width)
    yield from _linear(f"{decoder}.proj_in", width, VIDEO_LATENT)
    for layer in range(VIDEO_DECODER_LAYERS):
        block = f"{decoder}.transformer_blocks.{layer}"
        for i in (1, 2):
            yield f"{block}.scale{i}", (width,)
            yield from _norm(f"{block}.norm{i}", width)
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            yield from _linear(f"{block}.attn.{name}", width, width)
        yield from _linear(f"{block}.ff.net.0.proj", 8 * width, width)
        yield from _linear(f"{block}.ff.net.2", width, 4 * width)
    yield from _norm(f"{decoder}.norm_out", width, bias=True)
    yield from _linear(f"{decoder}.proj_out", 3 * 4 * 16 * 16, width)


def _conv(name: str, shape: Shape, biases: int) -> Named:
    """A weight-normed convolution; `shape[0]` are the norms' rows, which are not the biases' in a transposed one."""
    yield f"{name}.weight_g", (shape[0], 1, 1)
    yield f"{name}.weight_v", shape
    if biases:
        yield f"{name}.bias", (biases,)


def audio_vae() -> Named:
    """The audio VAE: waveform encoder, attention projection, waveform decoder."""
    yield from _audio_encoder("encoder.block")
    yield from _audio_projection("pre_block")
    for name in ("mean_proj", "logs_proj"):
        yield from _linear(name, AUDIO_LATENT, AUDIO_LATENT, 1)
    yield from _linear("dec_in_proj", AUDIO_TRUNK, AUDIO_LATENT, 1)
    yield from _audio_decoder("decoder")


def _audio_encoder(encoder: str) -> Named:
    width, last = AUDIO_WIDTH, len(AUDIO_ENCODER_RATES) + 1
    yield from _conv(f"{encoder}.0", (width, 1, 7), width)
    for i, rate in enumerate(AUDIO_ENCODER_RATES, 1):
        for unit in range(3):
            residual = f"{encoder}.{i}.block.{unit}.block"
            yield f"{residual}.0.alpha", (1, width, 1)
            yield from _conv(f"{residual}.1", (width, width, 7), width)
            yield f"{residual}.2.alpha", (1, width, 1)
            yield from _conv(f"{residual}.3", (width, width, 1), width)
        yield f"{encoder}.{i}.block.3.alpha", (1, width, 1)
        yield from _conv(f"{encoder}.{i}.block.4", (2 * width, width, 2 * rate), 2 * width)
        width *= 2
    yield f"{encoder}.{last}.alpha", (1, width, 1)
    yield from _conv(f"{encoder}.{last + 1}", (AUDIO_TRUNK, width, 3), AUDIO_TRUNK)


def _audio_projection(block: str) -> Named:
    for name, width in (("norm1", AUDIO_TRUNK), ("norm2", AUDIO_LATENT), ("norm3", AUDIO_TRUNK)):
        yield from _norm(f"{block}.{name}", width, bias=True)
    for name in ("q_bias", "v_bias", "zero_k_bias"):
        yield f"{block}.attn.{name}", (AUDIO_TRUNK,)
    yield from _linear(f"{block}.attn.qkv", 3 * AUDIO_TRUNK, AUDIO_TRUNK, bias=False)
    yield from _linear(f"{block}.attn.proj", AUDIO_LATENT, AUDIO_LATENT)
    yield from _linear(f"{block}.proj", AUDIO_LATENT, AUDIO_TRUNK)
    yield from _norm(f"{block}.mlp.norm", AUDIO_LATENT, bias=True)
    for name in ("w0", "w1"):
        yield from _linear(f"{block}.mlp.{name}", 2 * AUDIO_LATENT, AUDIO_LATENT)
    yield from _linear(f"{block}.mlp.w2", AUDIO_LATENT, 2 * AUDIO_LATENT)


def _audio_decoder(decoder: str) -> Named:
    width = AUDIO_DECODER
    yield from _conv(f"{decoder}.conv_pre", (width, AUDIO_TRUNK, 7), width)
    for i, kernel in enumerate(AUDIO_DECODER_KERNELS):
        yield from _conv(f"{decoder}.ups.{i}.0", (width, width // 2, kernel), width // 2)
        width //= 2
        block = f"{decoder}.resblocks.{i}"
        for name in ("convs1.0", "convs2.0"):
            yield from _conv(f"{block}.{name}", (width, width, 3), width)
        for name in ("activations.0", "activations.1"):
            yield from _activation(f"{block}.{name}", width)
    yield from _activation(f"{decoder}.activation_post", width)
    yield from _conv(f"{decoder}.conv_post", (1, width, 7), 0)


def _activation(name: str, width: int) -> Named:
    for leaf in ("alpha", "beta"):
        yield f"{name}.act.{leaf}", (width,)
    for resampler in ("upsample", "downsample.lowpass"):
        yield f"{name}.{resampler}.filter", (1, 1, 12)
