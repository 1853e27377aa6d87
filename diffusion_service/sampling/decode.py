"""From latents to uint8 frames and a waveform, chunk by chunk so that the file is written meanwhile. Torch.

The chunks and their cross-fade are those of diffusers' `AutoencoderKLMiniMaxH3._decode`, bit for bit; only the whole
clip never exists as floating point.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

from diffusion_service.model.precision import computing, materialise_fp16
from shared_runtime.tensor_float import tensor_float
from shared_schema.deploy.model import Precision
from shared_schema.errors import JobFailed

Beat = Callable[[], None]
"""Called whenever this rank, or the one it waits for, has decoded some tiles."""

TILES_AT_ONCE = 28
"""On a GPU: all tiles of one clip on the largest canvas; they take 5 GiB beside the weights."""


class VideoDecoder(Protocol):
    """The video VAE's decoder half, as a stream of finished frames, on one rank or spread over a group."""

    def decode(self, latents: torch.Tensor, num_frames: int, beat: Beat) -> Iterator[torch.Tensor | None]:
        """Frames `(n, height, width, 3)` uint8 on the host, in order; together exactly `num_frames`.

        In a group every rank calls it with the same latents `(1, 24, T, H, W)` and iterates equally often; the leader
        is given the frames, the others None.

        Raises:
            JobFailed: `numerical_error`, a pixel is NaN or infinite; on all ranks.
        """


class Chunks:
    """How the VAE cuts a clip in time, joins it again, and what its pixels mean."""

    def __init__(
        self,
        vae: AutoencoderKLMiniMaxH3,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        precision: Precision,
    ) -> None:
        device = vae.device
        if precision == "fp16":
            materialise_fp16(vae)
        self.vae = vae
        self.device = device
        self.size = vae.tokens_chunk_size * vae.temporal_compression_ratio
        """Frames from one chunk to the next, padding included."""
        self._precision: Precision = precision
        # One by one on a CPU, as diffusers does it: there a product of more rows may end in other bits.
        self._tiles_at_once = TILES_AT_ONCE if device.type == "cuda" else 1
        self._latents_mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self._latents_std = torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self._pixel_mean = torch.tensor(pixel_mean, device=device).view(1, -1, 1, 1, 1)
        self._pixel_std = torch.tensor(pixel_std, device=device).view(1, -1, 1, 1, 1)

    def count(self, latent_frames: int) -> int:
        """Chunks of so many latent frames."""
        vae = self.vae
        padded = -(-(latent_frames + vae.config.token_drop) // vae.tokens_chunk_size)
        return int(padded) - int(vae.config.token_drop > 0)

    def pieces(self, latent_frames: int, num_frames: int) -> tuple[int, ...]:
        """Frames of everything that a decoder yields: each chunk's head, then the last one's tail."""
        head = self.size - self.vae.frame_pre_padding
        ends = [min(head * (chunk + 1), num_frames) for chunk in range(self.count(latent_frames))] + [num_frames]
        lengths = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        assert lengths[-1] <= self.vae.frame_overlap, f"{latent_frames} latent frames are not {num_frames} frames"
        return tuple(length for length in lengths if length)

    def split(self, latents: torch.Tensor) -> list[torch.Tensor]:
        """What the decoder reads of each chunk, from normalised latents."""
        vae = self.vae
        size = vae.tokens_chunk_size
        latents = latents * self._latents_std + self._latents_mean
        count = self.count(latents.shape[2])
        missing = (count + int(vae.config.token_drop > 0)) * size - latents.shape[2] - vae.config.token_drop
        latents = torch.cat([latents, latents[:, :, -1:].repeat(1, 1, missing, 1, 1)], dim=2) if missing else latents
        return [latents[:, :, i * size : (i + 1) * size + vae.token_overlap] for i in range(count)]

    def compute(self) -> AbstractContextManager[object]:
        """The precision that the decoder computes in."""
        return computing(self._precision, self.device)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile the decoder, before anybody waits for it: one batch of tiles as the largest canvas has them."""
        vae, ratio = self.vae, self.vae.spatial_compression_ratio
        frames = vae.tokens_chunk_size + vae.token_overlap
        height, width = vae.tile_sample_min_height // ratio, vae.tile_sample_min_width // ratio
        tile = torch.zeros(1, vae.config.latent_channels, frames, height, width, device=self.device)
        self.decode_tiles([tile] * self._tiles_at_once, lambda: None)

    def decode_tiles(self, latents: Sequence[torch.Tensor], beat: Beat) -> list[torch.Tensor]:
        """Pixels `(1, 3, frames, height, width)` of every tile; all tiles have one shape."""
        vae = self.vae
        pixels: list[torch.Tensor] = []
        for first in range(0, len(latents), self._tiles_at_once):
            batch = latents[first : first + self._tiles_at_once]
            with self.compute():
                decoded = vae.decoder(vae.post_quant_conv(batch[0] if len(batch) == 1 else torch.cat(list(batch))))
            pixels += decoded.split(1)
            beat()
        return pixels

    def decode_clip(self, latents: torch.Tensor, beat: Beat) -> torch.Tensor:
        """A chunk `(1, 3, frames, height, width)`, stitched as `AutoencoderKLMiniMaxH3._decode_clip` does it."""
        vae, ratio = self.vae, self.vae.spatial_compression_ratio
        height, width = (extent * ratio for extent in latents.shape[-2:])
        rows = vae._split_tiles(height, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height)
        columns = vae._split_tiles(width, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width)
        places = [
            (slice(y // ratio, (y + high) // ratio), slice(x // ratio, (x + wide) // ratio))
            for y, high in zip(rows[0], rows[1], strict=True)
            for x, wide in zip(columns[0], columns[1], strict=True)
        ]
        pixels = self.decode_tiles([latents[..., y, x] for y, x in places], beat)
        across = len(columns[0])
        grid = [pixels[first : first + across] for first in range(0, len(pixels), across)]
        with self.compute():
            stitched: torch.Tensor = vae._stitch_tiles(grid, rows[2], columns[2])
        return stitched

    def head(self, decoded: torch.Tensor, tail_before: torch.Tensor | None) -> torch.Tensor:
        """The frames that a decoded chunk adds, cross-faded with the tail of the chunk before."""
        head = decoded[:, :, self.vae.frame_pre_padding : self.size]
        if tail_before is None:
            return head
        faded: torch.Tensor = self.vae._blend(tail_before, head, self.vae.frame_overlap, dim=-3)
        return faded

    def tail(self, decoded: torch.Tensor) -> torch.Tensor:
        """The frames that a decoded chunk shares with the next one."""
        return decoded[:, :, self.size + self.vae.frame_pre_padding :]

    def to_uint8(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(n, height, width, 3)` from `(1, 3, n, height, width)`, and whether all of it is finite, on the device.

        Round half to even of 255 times the clamped float32 value, as the digest defines it.
        """
        pixels = pixels.float() * self._pixel_std + self._pixel_mean
        levels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
        return levels[0].permute(1, 2, 3, 0).contiguous(), torch.isfinite(pixels).all()


class SingleDecoder:
    """A `VideoDecoder` of one rank: while the caller has the frames of one chunk, a GPU works on the next."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, num_frames: int, beat: Beat) -> Iterator[torch.Tensor]:
        """All frames in order; see `VideoDecoder.decode`."""
        pixels = self._pixels(latents, beat)
        lengths = self._chunks.pieces(latents.shape[2], num_frames)
        ahead: Arriving | None = None
        for length in lengths:
            frames, finite = self._chunks.to_uint8(next(pixels)[:, :, :length])
            ahead, ready = Arriving(frames, finite), ahead
            if ready is not None:
                yield ready.frames()
        if ahead is not None:
            yield ahead.frames()

    def _pixels(self, latents: torch.Tensor, beat: Beat) -> Iterator[torch.Tensor]:
        """Decoded chunks `(1, 3, n, height, width)` in the VAE's pixel convention, cross-faded, tail included."""
        tail = None
        for chunk in self._chunks.split(latents):
            decoded = self._chunks.decode_clip(chunk, beat)
            yield self._chunks.head(decoded, tail)
            tail = self._chunks.tail(decoded)
        assert tail is not None
        yield tail


class Arriving:
    """Frames on their way to the host, behind whatever the device was told before."""

    def __init__(self, frames: torch.Tensor, finite: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._source = frames
        if not frames.is_cuda:
            self._frames, self._finite = frames, finite
            return
        self._frames = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=True)
        self._finite = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._frames.copy_(frames, non_blocking=True)
        self._finite.copy_(finite, non_blocking=True)
        self._copied = torch.cuda.current_stream(frames.device).record_event()

    def frames(self) -> torch.Tensor:
        """Wait for them.

        Raises:
            JobFailed: `numerical_error`, a pixel is NaN or infinite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if not self._finite:
            raise not_finite()
        return self._frames


def not_finite() -> JobFailed:
    """What a decoder raises about pixels that are no numbers."""
    return JobFailed("decoded frames are not finite", code="numerical_error")


@torch.no_grad()
def decode_sound(vae: AutoencoderKLMiniMaxH3Audio, latents: torch.Tensor) -> torch.Tensor:
    """The waveform `(2, samples)` on the host; `latents` is `(2, 32, latents)`, one batch item a channel. All FP32.

    Raises:
        JobFailed: `numerical_error`, a sample is NaN or infinite.
    """
    mean = torch.tensor(vae.config.latents_mean, device=vae.device).view(1, -1, 1)
    std = torch.tensor(vae.config.latents_std, device=vae.device).view(1, -1, 1)
    with tensor_float(False):
        decoded = vae.decode(latents * std + mean, return_dict=False)[0]
    waveform: torch.Tensor = decoded.float()[:, 0].contiguous().cpu()
    if not torch.isfinite(waveform).all():
        raise JobFailed("decoded samples are not finite", code="numerical_error")
    return waveform
