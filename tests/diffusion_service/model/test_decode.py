"""Decoding without a service."""

from typing import Any

import pytest
import torch

from diffusion_service.sampling.decode import decode_sound
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_audio_vae


def test_sound_is_decoded_without_tensor_float(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    vae = load_audio_vae(tiny_checkpoint(), "decoder", "cpu")
    decode = vae.decode

    def watched(*arguments: Any, **named: Any) -> Any:
        seen.append(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
        return decode(*arguments, **named)

    monkeypatch.setattr(vae, "decode", watched)
    assert decode_sound(vae, torch.zeros(2, 32, 4)).shape == (2, 3200)
    assert seen == ["ieee"]
