"""The video VAE's encoder over the ranks of a group: tiles of all pictures and clips dealt out, or the leader alone.

diffusers' blocks call `vae.encode` and know nothing of it. Used by whoever encodes media: encoder ranks, and diffusion
ranks in the text-only split. Torch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState
from torch import nn

from shared_runtime.conditioning.blocks import Pipeline, run_block
from shared_runtime.conditioning.tile_runner import BatchedTiles, StockTiles
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.parcels import Parcel, deliver

Beat = Callable[[], None]
"""Called at every tile that this rank, or the one it waits for, has encoded."""
Mode = Literal["patch", "leader"]

Shapes = Iterable[tuple[int, int, int]]
"""Frames, height and width in pixels of pictures and clips."""


def _nothing() -> None:
    pass


class VisualEncoder(Protocol):
    """Runs a block that encodes pictures and clips; afterwards the state is the same on every rank."""

    @property
    def vae(self) -> Any:
        """What the block's pipeline takes for its component `vae`."""

    def tiles(self, shapes: Shapes) -> list[int]:
        """Frames of each tile that this rank encodes, in order; none where the leader does all."""

    def run(self, block: ModularPipelineBlocks, pipeline: Pipeline, state: PipelineState, beat: Beat) -> None:
        """Do the block. A collective: every rank has the same state."""


def visual_encoder(vae: Any | None, comm: RankComm, mode: Mode, batched: BatchedTiles | None = None) -> VisualEncoder:
    """How a group encodes pictures; `vae` is the encoder half, None on followers that leave it to the leader.

    With `batched`, which was made of `vae`, that does the work in its place; without, diffusers' own modules do.
    """
    if mode == "leader" and comm.world_size > 1:
        return LeaderEncoder(vae, comm, batched)
    assert vae is not None
    if batched is None and comm.world_size == 1:
        return SingleEncoder(vae)
    return TileEncoder(vae, comm, batched or StockTiles(vae))


class SingleEncoder:
    """A `VisualEncoder` of one rank."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def tiles(self, shapes: Shapes) -> list[int]:
        """All of them; see `VisualEncoder.tiles`."""
        return _tiles(self.vae, shapes)

    def run(self, block: ModularPipelineBlocks, pipeline: Pipeline, state: PipelineState, beat: Beat) -> None:
        """Do the block; see `VisualEncoder.run`."""
        with _beating(self.vae, beat):
            run_block(block, pipeline, state)


class LeaderEncoder:
    """A `VisualEncoder` of a group that leaves the work to its leader; the others need no weights."""

    def __init__(self, vae: Any | None, comm: RankComm, batched: BatchedTiles | None) -> None:
        share = None if vae is None or batched is None else TileShare.instead(vae, batched)
        self.vae = LeaderVae(vae, comm, share)
        self._whole = vae

    def tiles(self, shapes: Shapes) -> list[int]:
        """All of them or none; see `VisualEncoder.tiles`."""
        return [] if self._whole is None else _tiles(self._whole, shapes)

    def run(self, block: ModularPipelineBlocks, pipeline: Pipeline, state: PipelineState, beat: Beat) -> None:
        """Do the block; see `VisualEncoder.run`."""
        self.vae.beat = beat
        run_block(block, pipeline, state)


class LeaderVae:
    """The video VAE's encoder half on the leader; `encode` is a collective whose result every rank gets."""

    def __init__(self, vae: Any | None, comm: RankComm, share: "TileShare | None") -> None:
        """`share` stands in `vae` where tiles are encoded in batches."""
        self._vae = vae
        self._share = share
        self._comm = comm
        self.beat: Beat = _nothing
        facts = comm.from_leader(lambda: _facts(vae))
        self.config, self.spatial_compression_ratio, self.tokens_chunk_size = facts

    def encode(self, pixels: torch.Tensor, return_dict: bool = True) -> tuple[DiagonalGaussianDistribution]:
        """The posterior of normalised pixels `(1, 3, frames, height, width)`, on every rank."""
        assert not return_dict

        moments = self._comm.from_busy_leader(lambda tell: self._moments(pixels, tell), self.beat)
        return (DiagonalGaussianDistribution(moments.to(pixels.device)),)

    def _moments(self, pixels: torch.Tensor, tell: Beat) -> torch.Tensor:
        vae, share = self._vae, self._share
        assert vae is not None
        if share is None:
            with _beating(vae, tell):
                posterior = vae.encode(pixels, return_dict=False)[0]
        else:
            with share.dealing(tell):
                vae.encode(pixels, return_dict=False)
            with share.replaying([share.encoded[number] for number in range(len(share.dealt))]):
                posterior = vae.encode(pixels, return_dict=False)[0]
        moments: torch.Tensor = posterior.parameters
        return moments


class TileEncoder:
    """A `VisualEncoder` of a group that deals out the tiles of everything that a block encodes.

    The block is run twice: once for every rank to encode its share, with zeros in place of the others' tiles, and once
    more with all tiles there, for which the shapes of what it encodes are enough. What a block does around the encoder
    is little, and the media need not be kept as tiles.
    """

    def __init__(self, vae: Any, comm: RankComm, runner: StockTiles | BatchedTiles) -> None:
        self.vae = vae
        self._comm = comm
        self._share = TileShare.instead(vae, runner, comm.spec.rank, comm.world_size)

    def tiles(self, shapes: Shapes) -> list[int]:
        """As many as this rank will have; see `VisualEncoder.tiles`."""
        return _tiles(self.vae, shapes)[self._comm.spec.rank :: self._comm.world_size]

    def run(self, block: ModularPipelineBlocks, pipeline: Pipeline, state: PipelineState, beat: Beat) -> None:
        """Do the block; see `VisualEncoder.run`."""
        share = self._share
        with share.dealing(beat):
            run_block(block, pipeline, state)
        ranks = range(self._comm.world_size)
        parcels = [
            Parcel((number, target), owner, target, shape)
            for number, (owner, shape) in enumerate(share.dealt)
            for target in ranks
        ]
        arrived = deliver(self._comm, parcels, lambda key: share.encoded[key[0]], torch.float32)
        with share.replaying([arrived[number, self._comm.spec.rank] for number in range(len(share.dealt))]):
            run_block(block, pipeline, state)


class TileShare(nn.Module):
    """Stands in the VAE where its `encoder` and `quant_conv` stood, and is called once for every tile."""

    def __init__(self, vae: Any, runner: StockTiles | BatchedTiles, rank: int, ranks: int) -> None:
        super().__init__()
        self.runner = runner
        self._channels = vae.quant_conv.out_channels
        self.dealt: list[tuple[int, tuple[int, ...]]] = []
        """Owner and shape of the moments, by tile in the order of the calls."""
        self.encoded: dict[int, torch.Tensor] = {}
        """Moments of this rank's tiles."""
        self._rank = rank
        self._loads = [0] * ranks
        self._strides = tuple(
            zip(vae.config.temporal_downsample_factors, vae.config.spatial_downsample_factors, strict=True)
        )
        self._batch: list[tuple[int, torch.Tensor]] = []
        """Tiles of one shape that wait for more of it, by number."""
        self._pace = Pace()
        self._ready: Iterator[torch.Tensor] | None = None

    @classmethod
    def instead(cls, vae: Any, runner: StockTiles | BatchedTiles, rank: int = 0, ranks: int = 1) -> Self:
        """Put one into a VAE, whose own modules go unless `runner` needs them."""
        share = cls(vae, runner, rank, ranks)
        vae.encoder, vae.quant_conv = share, nn.Identity()
        return share

    @contextmanager
    def dealing(self, beat: Beat) -> Iterator[None]:
        """Within it, calls encode this rank's tiles alone; at its end all of them are encoded."""
        self.dealt, self.encoded, self._batch, self._pace = [], {}, [], Pace(beat)
        self._loads = [0] * len(self._loads)
        try:
            yield
            self._encode_batch()
            self._pace.finish()
        except BaseException:
            # Whole clips hang on these.
            self.encoded, self._batch, self._pace = {}, [], Pace()
            raise

    @contextmanager
    def replaying(self, moments: list[torch.Tensor]) -> Iterator[None]:
        """Within it, calls are answered with `moments` of all tiles, in the order of the calls."""
        self._ready = iter(moments)
        self.encoded = {}
        try:
            yield
            assert next(self._ready, None) is None, "the block asked for fewer tiles than the first time"
        finally:
            self._ready = None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Moments `(1, 48, t, h, w)` of one tile `(1, 3, frames, height, width)`."""
        if self._ready is not None:
            return next(self._ready)
        owner = self._loads.index(min(self._loads))
        self._loads[owner] += pixels.numel()
        shape = self._shape(pixels)
        self.dealt.append((owner, shape))
        if owner == self._rank:
            self._take(len(self.dealt) - 1, pixels)
        # Nobody looks at these: on the host, so that what the block makes of them waits for no GPU.
        return torch.zeros(shape)

    def _take(self, number: int, pixels: torch.Tensor) -> None:
        if self._batch and self._batch[0][1].shape != pixels.shape:
            self._encode_batch()
        self._batch.append((number, pixels))
        if len(self._batch) >= self.runner.at_once(pixels):
            self._encode_batch()

    def _encode_batch(self) -> None:
        if not self._batch:
            return
        made = self.runner.encode([pixels for _, pixels in self._batch])
        for (number, _), moments in zip(self._batch, made, strict=True):
            wanted = self.dealt[number][1]
            assert moments.shape == wanted, f"a tile became {tuple(moments.shape)}, not {wanted}"
            self.encoded[number] = moments
        self._batch = []
        self._pace.queued(made)

    def _shape(self, pixels: torch.Tensor) -> tuple[int, ...]:
        batch, _, frames, height, width = pixels.shape
        for in_time, in_space in self._strides:
            frames, height, width = -(-frames // in_time), height // in_space, width // in_space
        return (batch, self._channels, frames, height, width)


class Pace:
    """Beats when tiles are encoded, not when a GPU was told to, and lets the host run one batch ahead of it."""

    def __init__(self, beat: Beat = _nothing) -> None:
        self._beat = beat
        self._under_way: deque[tuple[int, torch.cuda.Event | None]] = deque()

    def queued(self, moments: list[torch.Tensor]) -> None:
        """A batch was begun; wait for the one before it."""
        event = torch.cuda.current_stream(moments[0].device).record_event() if moments[0].is_cuda else None
        self._under_way.append((len(moments), event))
        self._wait(1 if event is not None else 0)

    def finish(self) -> None:
        """Wait for all of them."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        while len(self._under_way) > left:
            tiles, event = self._under_way.popleft()
            if event is not None:
                event.synchronize()
            for _ in range(tiles):
                self._beat()


def _tiles(vae: Any, shapes: Shapes) -> list[int]:
    """Frames of each tile that the VAE cuts pictures and clips into."""
    found: list[int] = []
    for frames, height, width in shapes:
        rows, _, _ = vae._split_tiles(height, vae.tile_sample_min_height, vae.tile_sample_min_overlap_height)
        columns, _, _ = vae._split_tiles(width, vae.tile_sample_min_width, vae.tile_sample_min_overlap_width)
        length = 1 if frames == 1 else vae.config.clip_length
        found += [length] * (-(-frames // length) * len(rows) * len(columns))
    return found


@contextmanager
def _beating(vae: Any, beat: Beat) -> Iterator[None]:
    hook = vae.encoder.register_forward_hook(lambda *_: beat())
    try:
        yield
    finally:
        hook.remove()


def _facts(vae: Any) -> tuple[Any, int, int]:
    """What the pipeline asks of a VAE beside its `encode`."""
    return vae.config, vae.spatial_compression_ratio, vae.tokens_chunk_size
