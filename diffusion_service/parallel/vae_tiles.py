"""The video decoder over the ranks of a group: the tiles of several clips at once, or the leader alone. Torch.

Every rank decodes its share of a window of clips. Then edges travel: a tile is blended with the tile above it, then
with the one to the left, as `AutoencoderKLMiniMaxH3._stitch_tiles` does, and in time with the tail of the clip before,
by the rank that decoded the tile. What is finished goes to the leader as uint8. The result is that of one rank, bit
for bit. Runs in diffusion ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_service.parallel.tile_plan import Deal, Tile, spans, tiles
from diffusion_service.sampling.decode import Beat, Chunks, SingleDecoder, VideoDecoder, not_finite
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.parcels import Parcel, deliver

ClipTile = tuple[int, int]
"""A clip and a tile of it."""
Edge = tuple[int, int, int]
"""A clip, a tile of it, and the neighbour whose edge the tile blends."""


def video_decoder(chunks: Chunks | None, comm: RankComm, patch_parallel_size: int) -> VideoDecoder:
    """The decoder of a group: over all its ranks, or on its leader where `patch_parallel_size` is 1.

    `chunks` is None on ranks that hold no decoder, because the leader does the work.
    """
    if patch_parallel_size == 1 and comm.world_size > 1:
        return LeaderDecoder(chunks, comm)
    assert chunks is not None
    return TileDecoder(chunks, comm) if comm.world_size > 1 else SingleDecoder(chunks)


def tiles_of(vae: Any, height: int, width: int) -> tuple[Tile, ...]:
    """The tiles that the VAE lays over a canvas of so many pixels."""
    rows = vae._split_tiles(height, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height)
    columns = vae._split_tiles(width, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width)
    return tiles(spans(*rows), spans(*columns))


def blend(vae: Any, tile: Tile, raw: torch.Tensor, above: torch.Tensor | None, left: torch.Tensor | None) -> Any:
    """The pixels that a tile owns.

    Args:
        vae: whose cross-fade it is.
        tile: which one.
        raw: the tile as decoded, `(..., height, width)`.
        above: the bottom rows of the decoded tile above, where there is one.
        left: the right columns of the decoded tile to the left, where there is one.
    """
    pixels = raw if above is None else vae._blend(above, raw, tile.y.before, dim=-2)
    pixels = pixels if left is None else vae._blend(left, pixels, tile.x.before, dim=-1)
    return pixels[..., : tile.y.length - tile.y.after, : tile.x.length - tile.x.after]


class LeaderDecoder:
    """A `VideoDecoder` of a group that leaves the work to its leader; the others need no weights."""

    def __init__(self, chunks: Chunks | None, comm: RankComm) -> None:
        self._chunks = chunks
        self._comm = comm

    def decode(self, latents: torch.Tensor, num_frames: int, beat: Beat) -> Iterator[torch.Tensor | None]:
        """Frames on the leader, None elsewhere; see `VideoDecoder.decode`."""
        pulse = beat
        stream: Iterator[torch.Tensor] | None = None
        frames: torch.Tensor | None = None

        def begin() -> int:
            nonlocal stream
            assert self._chunks is not None
            stream = SingleDecoder(self._chunks).decode(latents, num_frames, lambda: pulse())
            return len(self._chunks.pieces(latents.shape[2], num_frames))

        def advance(tell: Beat) -> None:
            nonlocal frames, pulse
            assert stream is not None
            pulse = tell
            frames = next(stream)

        for _ in range(self._comm.from_leader(begin)):
            self._comm.from_busy_leader(advance, beat)
            yield frames


class TileDecoder:
    """A `VideoDecoder` of a group that deals out the tiles of all clips in flight."""

    def __init__(self, chunks: Chunks, comm: RankComm) -> None:
        self._chunks = chunks
        self._comm = comm

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, num_frames: int, beat: Beat) -> Iterator[torch.Tensor | None]:
        """Frames on the leader, None elsewhere; see `VideoDecoder.decode`."""
        vae = self._chunks.vae
        height, width = (extent * vae.spatial_compression_ratio for extent in latents.shape[-2:])
        laid = tiles_of(vae, height, width)
        clips = self._chunks.split(latents)
        lengths = self._chunks.pieces(latents.shape[2], num_frames)
        work = _Decoding(self._chunks, self._comm, laid, Deal(self._comm.world_size, len(clips), len(laid)), clips)
        for window in work.deal.windows():
            pieces = work.decode_window(window, beat)
            for number in [number for number in pieces if number < len(lengths)]:
                yield work.gather(number, pieces.pop(number), (lengths[number], height, width, 3))


@dataclass
class _Finished:
    """This rank's part of what is yielded at once: pixels by tile, and whether all of them are numbers."""

    frames: dict[int, torch.Tensor]
    finite: list[torch.Tensor]


class _Decoding:
    """One clip under way: what a rank must remember from window to window."""

    def __init__(
        self, chunks: Chunks, comm: RankComm, laid: tuple[Tile, ...], deal: Deal, clips: list[torch.Tensor]
    ) -> None:
        self.deal = deal
        self._chunks = chunks
        self._comm = comm
        self._tiles = laid
        self._clips = clips
        self._tails: dict[ClipTile, torch.Tensor] = {}
        """Of clips decoded before, for the tiles that this rank blends next."""

    def decode_window(self, window: range, beat: Beat) -> dict[int, _Finished]:
        """This rank's pixels of the window's clips, by number of the piece that they are yielded with."""
        mine = [(clip, tile) for clip, tile in self._all(window) if self._owns(clip, tile)]
        decoded = self._chunks.decode_tiles([self._latents(clip, tile) for clip, tile in mine], beat)
        raw = {(clip, tile.index): pixels for (clip, tile), pixels in zip(mine, decoded, strict=True)}
        del decoded
        edges = self._swap_edges(window, raw)
        blended: dict[ClipTile, torch.Tensor] = {}
        for clip, tile in mine:
            above = None if tile.above is None else edges[clip, tile.index, tile.above]
            left = None if tile.left is None else edges[clip, tile.index, tile.left]
            blended[clip, tile.index] = blend(self._chunks.vae, tile, raw[clip, tile.index], above, left)
        del raw, edges
        self._tails.update(self._swap_tails(window, blended))
        return self._finish(window, blended)

    def _all(self, window: range) -> list[tuple[int, Tile]]:
        return [(clip, tile) for clip in window for tile in self._tiles]

    def _owns(self, clip: int, tile: Tile) -> bool:
        return self.deal.owner(clip, tile.index) == self._comm.spec.rank

    def _latents(self, clip: int, tile: Tile) -> torch.Tensor:
        ratio = self._chunks.vae.spatial_compression_ratio
        y, x = (slice(s.start // ratio, s.start // ratio + s.length // ratio) for s in (tile.y, tile.x))
        return self._clips[clip][..., y, x]

    def _swap_edges(self, window: range, raw: dict[ClipTile, torch.Tensor]) -> dict[Edge, torch.Tensor]:
        """The edges of decoded tiles to those who blend them."""
        parcels: list[Parcel[Edge]] = []
        for clip, tile in self._all(window):
            target = self.deal.owner(clip, tile.index)
            if tile.above is not None:
                shape = self._shape(clip, tile.y.before, tile.x.length)
                parcels.append(Parcel((clip, tile.index, tile.above), self.deal.owner(clip, tile.above), target, shape))
            if tile.left is not None:
                shape = self._shape(clip, tile.y.length, tile.x.before)
                parcels.append(Parcel((clip, tile.index, tile.left), self.deal.owner(clip, tile.left), target, shape))

        def edge(key: Edge) -> torch.Tensor:
            clip, index, neighbour = key
            tile = self._tiles[index]
            rows, columns = (-tile.y.before, 0) if neighbour == tile.above else (0, -tile.x.before)
            return raw[clip, neighbour][..., rows:, columns:]

        return deliver(self._comm, parcels, edge, _dtype(raw))

    def _swap_tails(self, window: range, blended: dict[ClipTile, torch.Tensor]) -> dict[ClipTile, torch.Tensor]:
        """The tails of clips to those who finish the same tile of the next clip."""
        parcels: list[Parcel[ClipTile]] = []
        for clip, tile in self._all(window):
            if clip + 1 < self.deal.clips:
                *channels, frames, height, width = self._shape(clip, *_owned(tile))
                shape = (*channels, frames - self._chunks.size - self._chunks.vae.frame_pre_padding, height, width)
                owners = self.deal.owner(clip, tile.index), self.deal.owner(clip + 1, tile.index)
                parcels.append(Parcel((clip, tile.index), *owners, shape))
        # Contiguous, because a view would keep the whole tile until the next window.
        return deliver(self._comm, parcels, lambda key: self._chunks.tail(blended[key]).contiguous(), _dtype(blended))

    def _finish(self, window: range, blended: dict[ClipTile, torch.Tensor]) -> dict[int, _Finished]:
        pieces = {clip: _Finished({}, []) for clip in window}
        if self.deal.clips in range(window.start + 1, window.stop + 1):
            pieces[self.deal.clips] = _Finished({}, [])
        for clip, index in list(blended):
            decoded = blended.pop((clip, index))
            self._add(pieces[clip], index, self._chunks.head(decoded, self._tails.pop((clip - 1, index), None)))
            if clip + 1 == self.deal.clips:
                self._add(pieces[clip + 1], index, self._chunks.tail(decoded))
        return pieces

    def _add(self, piece: _Finished, index: int, pixels: torch.Tensor) -> None:
        frames, finite = self._chunks.to_uint8(pixels)
        piece.frames[index] = frames
        piece.finite.append(finite)

    def gather(self, number: int, piece: _Finished, shape: tuple[int, int, int, int]) -> torch.Tensor | None:
        """All ranks' pixels of a piece as frames `shape` on the leader's host; None elsewhere."""
        finite = not piece.finite or bool(torch.stack(piece.finite).all())
        self._comm.agree(None if finite else not_finite())
        length = shape[0]
        clip = min(number, self.deal.clips - 1)
        parcels = [
            Parcel(tile.index, self.deal.owner(clip, tile.index), 0, (length, *_owned(tile), 3)) for tile in self._tiles
        ]
        arrived = deliver(self._comm, parcels, lambda index: piece.frames[index][:length], torch.uint8)
        if not self._comm.is_leader:
            return None
        frames = torch.empty(shape, dtype=torch.uint8, device=self._chunks.device)
        for tile in self._tiles:
            frames[:, tile.y.owned, tile.x.owned] = arrived[tile.index]
        return frames.cpu()

    def _shape(self, clip: int, height: int, width: int) -> tuple[int, ...]:
        """Of so many rows and columns of a decoded clip."""
        vae = self._chunks.vae
        frames = self._clips[clip].shape[2] * vae.temporal_compression_ratio
        return (self._clips[clip].shape[0], vae.config.out_channels, frames, height, width)


def _owned(tile: Tile) -> tuple[int, int]:
    """Rows and columns that a tile owns."""
    return tile.y.length - tile.y.after, tile.x.length - tile.x.after


def _dtype(held: dict[ClipTile, torch.Tensor]) -> torch.dtype:
    """Of what this rank decoded; a rank that decoded nothing has nothing to send, and receives nothing."""
    return next((each.dtype for each in held.values()), torch.float32)
