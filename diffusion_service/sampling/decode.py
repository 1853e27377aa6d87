"""From latents to uint8 frames and a waveform, chunk by chunk so that the file is written meanwhile. Torch.

The chunks and their cross-fade are those of diffusers' `AutoencoderKLMiniMaxH3._decode`, bit for bit; only the whole
clip never exists as floating point.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

from shared_schema.errors import JobFailed

Precision = Literal["fp16", "tf32", "fp32"]


class VideoDecoder:
    """The video VAE's decoder half, as a stream of finished frames."""

    def __init__(
        self,
        vae: AutoencoderKLMiniMaxH3,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        precision: Precision,
    ) -> None:
        device = vae.device
        self._vae = vae
        self.device = device
        self._precision = precision
        self._latents_mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self._latents_std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self._pixel_mean = torch.tensor(pixel_mean, device=device).view(1, -1, 1, 1, 1)
        self._pixel_std = torch.tensor(pixel_std, device=device).view(1, -1, 1, 1, 1)

    def chunks_of(self, latent_frames: int) -> int:
        """How many chunks `decode` yields for so many latent frames."""
        vae = self._vae
        padded = -(-(latent_frames + vae.config.token_drop) // vae.tokens_chunk_size)
        return int(padded) - int(vae.config.token_drop > 0)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, num_frames: int) -> Iterator[torch.Tensor]:
        """Frames `(n, height, width, 3)` uint8 on the host, in order; together exactly `num_frames`.

        Raises:
            JobFailed: `numerical_error`, a pixel is NaN or infinite.
        """
        left = num_frames
        for pixels in self._chunks(latents * self._latents_std + self._latents_mean):
            frames = self._to_uint8(pixels[:, :, :left])
            left -= frames.shape[0]
            if frames.shape[0]:
                yield frames
        assert left == 0, f"{left} frames were not decoded"

    def _chunks(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """Decoded chunks `(1, 3, n, height, width)` in the VAE's pixel convention, cross-faded, tail included."""
        vae = self._vae
        size = vae.tokens_chunk_size
        frames_per_chunk = size * vae.temporal_compression_ratio
        count = self.chunks_of(latents.shape[2])
        missing = (count + int(vae.config.token_drop > 0)) * size - latents.shape[2] - vae.config.token_drop
        latents = torch.cat([latents, latents[:, :, -1:].repeat(1, 1, missing, 1, 1)], dim=2) if missing else latents
        tail = None
        for index in range(count):
            start = index * size
            with self._compute():
                clip = vae._decode_clip(latents[:, :, start : start + size + vae.token_overlap])
            head = clip[:, :, vae.frame_pre_padding : frames_per_chunk]
            yield head if tail is None else vae._blend(tail, head, vae.frame_overlap, dim=-3)
            tail = clip[:, :, frames_per_chunk + vae.frame_pre_padding :]
        assert tail is not None
        yield tail

    def _compute(self) -> AbstractContextManager[object]:
        if self._precision == "fp16":
            return torch.autocast(self.device.type, torch.float16)
        return nullcontext()

    def _to_uint8(self, pixels: torch.Tensor) -> torch.Tensor:
        """Round half to even of 255 times the clamped float32 value, as the digest defines it."""
        pixels = pixels.float() * self._pixel_std + self._pixel_mean
        if not torch.isfinite(pixels).all():
            raise JobFailed("decoded frames are not finite", code="numerical_error")
        levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
        frames: torch.Tensor = levels[0].permute(1, 2, 3, 0).contiguous().cpu()
        return frames


@torch.no_grad()
def decode_sound(vae: AutoencoderKLMiniMaxH3Audio, latents: torch.Tensor) -> torch.Tensor:
    """The waveform `(2, samples)` float32 on the host; `latents` is `(2, 32, latents)`, one batch item a channel.

    Raises:
        JobFailed: `numerical_error`, a sample is NaN or infinite.
    """
    mean = torch.tensor(vae.config.latents_mean, device=vae.device).view(1, -1, 1)
    std = torch.tensor(vae.config.latents_std, device=vae.device).view(1, -1, 1)
    decoded = vae.decode(latents * std + mean, return_dict=False)[0]
    waveform: torch.Tensor = decoded.float()[:, 0].contiguous().cpu()
    if not torch.isfinite(waveform).all():
        raise JobFailed("decoded samples are not finite", code="numerical_error")
    return waveform
