"""The text-only split: the media of a request, encoded by the ranks that make its clip. Diffusion ranks; torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from diffusion_service.commands import MediaFiles
from shared_runtime.conditioning.blocks import assemble
from shared_runtime.conditioning.latents import MediaEncoder
from shared_runtime.conditioning.media import MediaReader
from shared_runtime.conditioning.packing import Conditions
from shared_runtime.ranks.comm import RankComm
from shared_schema.layout import Layout


@dataclass(frozen=True)
class Completed:
    """What a payload with media would have held, and seconds by stage."""

    conditions: Conditions
    layout: Layout
    timings: dict[str, float]


class MediaConditioner:
    """Adds a request's media to conditions that came as text alone."""

    def __init__(self, checkpoint: Path, encoder: MediaEncoder, comm: RankComm) -> None:
        self._encoder = encoder
        self._reader = MediaReader(comm)
        blocks = {**self._reader.blocks, **encoder.blocks}
        self._pipeline = assemble(checkpoint, blocks, encoder.components, comm.device)

    def complete(
        self, text: Conditions, media: MediaFiles, go_on: Callable[[], None], beat: Callable[[], None]
    ) -> Completed:
        """Read and encode the media; the same on every rank. A collective.

        `go_on` is called after each stage and raises once the clip is not wanted, `beat` within them.

        Raises:
            InvalidRequest: a file cannot be decoded after all.
            LayoutInvalid: what came out cannot condition a clip.
        """
        begun = time.perf_counter()
        prepared = self._reader.read(self._pipeline, media.request, media.files, beat)
        read = time.perf_counter()
        go_on()
        latents = self._encoder.encode(self._pipeline, media.request, prepared.state(), beat)
        latents.layout.check()
        timings = {"media_read": round(read - begun, 6), "media_encode": round(time.perf_counter() - read, 6)}
        go_on()
        conditions = replace(text, visual=latents.visual, audio=latents.audio)
        return Completed(conditions, latents.layout, timings)
