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
        self._room = room
        self._ways = Ways.read() if ways is None else ways
        self.clip = self._model(vae, "clip", precision)
        self.picture = self._model(vae, "picture", precision)
        self._whole_tile = (vae.tile_sample_min_height, vae.tile_sample_min_width)
        self._frames = {"clip": vae.config.clip_length, "picture": 1}
        self._widest = vae.config.block_out_channels[0]
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

    def at_once(self, tile: torch.Tensor) -> int:
        """As many as the table says, or as there is room for."""
        most = self._ways.of(_kind(tile)).tiles_at_once
        return max(1, min(most, int(self._room(tile.device) * ROOM_USED) // self.tile_bytes(tile)))

    def tile_bytes(self, tile: torch.Tensor) -> int:
        """Bytes that encoding one tile takes beside the weights, at most."""
        widest: int = self._widest
        return VALUES_AT_ONCE * widest * tile[0, 0].numel() * tile.element_size()

    def encode(self, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `TileRunner.encode`."""
        kind = _kind(tiles[0])
        compiled = self._compiled.get(kind) if tiles[0].shape[-2:] == self._whole_tile else None
        if compiled is None:
            model = self.clip if kind == "clip" else self.picture
            return list(torch.split(model(torch.cat(list(tiles))), 1))
        # A lone tile is encoded twice: a batch of one would be a graph of its own.
        batch = torch.cat([*tiles, tiles[0]] if len(tiles) == 1 else list(tiles))
        torch._dynamo.mark_dynamic(batch, 0)
        return list(torch.split(compiled(batch), 1))[: len(tiles)]

    @torch.no_grad()
    def warm_up(self, beat: Callable[[], None]) -> None:
        """Compile, before anybody waits for it."""
        device = next(self.buffers()).device
        for kind in self._compiled:
            tile = torch.zeros(1, 3, self._frames[kind], *self._whole_tile, device=device)
            self.encode([tile] * self.at_once(tile))
            beat()


def _kind(tile: torch.Tensor) -> Kind:
    return "picture" if tile.shape[2] == 1 else "clip"
