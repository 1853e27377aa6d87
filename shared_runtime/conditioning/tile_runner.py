"""What encodes tiles: diffusers' modules one by one, or batches in the precision of the deploy file. Torch."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shared_runtime.conditioning.tile_model import TileModel
from shared_runtime.conditioning.ways import Kind, Way, Ways
from shared_schema.deploy.model import EncodePrecision

VALUES_AT_ONCE = 12
"""Tensors as large as the largest of a tile that live at one time: input, padded pieces, products, residual; measured
high, as a batch that is too small costs less than one that does not fit."""
ROOM_USED = 0.9
"""Share of the GPU's free memory that a batch may fill."""


def free_bytes(device: torch.device) -> int:
    """What this process could still take of a GPU; as good as everything elsewhere."""
    if device.type != "cuda":
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class TileRunner(Protocol):
    """Encodes tiles of one shape."""

    def at_once(self, tile: torch.Tensor) -> int:
        """How many tiles like this one make a batch."""

    def encode(self, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Moments `(1, 48, t, h, w)` of each tile `(1, 3, frames, height, width)`; all have one shape."""


class StockTiles(nn.Module):
    """A `TileRunner` of diffusers' own modules: the reference, bit for bit, one tile at a time."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.encoder = vae.encoder
        self.quant_conv = vae.quant_conv

    def at_once(self, tile: torch.Tensor) -> int:
        """On a CPU a product of more rows may end in other bits."""
        del tile
        return 1

    def encode(self, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `TileRunner.encode`."""
        return [self.quant_conv(self.encoder(tile)) for tile in tiles]


class BatchedTiles(nn.Module):
    """A `TileRunner` of batches; tiles of the released size are compiled, smaller ones, which are rare, are not."""

    def __init__(
        self,
        vae: Any,
        precision: EncodePrecision,
        ways: Ways | None = None,
        *,
        compiler: str | None,
        room: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        """`compiler`: torch's name of one, or None; `ways`: None for the repository's table."""
        super().__init__()
        self._ways = Ways.read() if ways is None else ways
        self.clip = self._model(vae, "clip", precision)
        self.picture = self._model(vae, "picture", precision)
        self._whole_tile: tuple[int, int] = (vae.tile_sample_min_height, vae.tile_sample_min_width)
        self._frames: dict[Kind, int] = {"clip": vae.config.clip_length, "picture": 1}
        self._widest: int = vae.config.block_out_channels[0]
        # Settled once: batches of another size may end in other bits, and what is free changes.
        free = room(next(vae.parameters()).device)
        self.most: dict[Kind, int] = {kind: self._fits(kind, free) for kind in ("clip", "picture")}
        """Tiles in a batch."""
        self._compiled: dict[Kind, Callable[[torch.Tensor], torch.Tensor]] = {}
        if compiler is not None:
            # One graph a kind: the number of tiles is a symbol in it.
            models: dict[Kind, TileModel] = {"clip": self.clip, "picture": self.picture}
            self._compiled = {
                kind: torch.compile(model, fullgraph=True, backend=compiler) for kind, model in models.items()
            }

    def _model(self, vae: Any, kind: Kind, precision: EncodePrecision) -> TileModel:
        known = self._ways.of(kind)

        def way(layer: str) -> Way:
            return known.way(layer) if precision == "split" else precision

        return TileModel(vae, way, known.layout, flat=kind == "picture")

    def _fits(self, kind: Kind, free: int) -> int:
        frames, (height, width) = self._frames[kind], self._whole_tile
        tile_bytes = VALUES_AT_ONCE * self._widest * frames * height * width * torch.float32.itemsize
        return max(1, min(self._ways.of(kind).tiles_at_once, int(free * ROOM_USED) // tile_bytes))

    def at_once(self, tile: torch.Tensor) -> int:
        """As many as were settled at start."""
        return self.most[_kind(tile)]

    def encode(self, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `TileRunner.encode`."""
        kind = _kind(tiles[0])
        compiled = self._compiled.get(kind) if tiles[0].shape[-2:] == self._whole_tile else None
        # A batch of one would be a graph of its own.
        if compiled is None or len(tiles) == 1:
            model = self.clip if kind == "clip" else self.picture
            return list(torch.split(model(torch.cat(list(tiles))), 1))
        batch = torch.cat(list(tiles))
        torch._dynamo.mark_dynamic(batch, 0)
        return list(torch.split(compiled(batch), 1))

    @torch.no_grad()
    def warm_up(self, beat: Callable[[], None]) -> None:
        """Compile, before anybody waits for it."""
        device = next(self.buffers()).device
        for kind, most in self.most.items():
            if kind not in self._compiled or most < 2:
                continue
            tile = torch.zeros(1, 3, self._frames[kind], *self._whole_tile, device=device)
            self.encode([tile] * most)
            beat()


def _kind(tile: torch.Tensor) -> Kind:
    return "picture" if tile.shape[2] == 1 else "clip"
