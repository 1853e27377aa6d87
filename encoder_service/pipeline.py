"""One request through the three encoders, in the words of diffusers' own blocks. Runs in an encoder rank; torch."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers.modular_pipelines import ModularPipelineBlocks, PipelineState
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3TextEncoderStep,
)

from encoder_service.looking import LookingTextBlock
from shared_runtime.conditioning.blocks import Pipeline, assemble, run_block
from shared_runtime.conditioning.latents import Latents, MediaEncoder
from shared_runtime.conditioning.media import MediaReader
from shared_runtime.conditioning.packing import Conditions, Packed, pack
from shared_runtime.conditioning.references import Reference
from shared_runtime.conditioning.side_stream import SideStream
from shared_runtime.conditioning.taken import Vision
from shared_runtime.ranks.comm import RankComm
from shared_runtime.tracing import span
from shared_schema.encode import EncodeProgress, EncodeRequest, UsedReference
from shared_schema.tasks import Task


@dataclass(frozen=True)
class EncodedRequest:
    """A finished payload, what was used of each reference, and seconds by stage."""

    payload: Packed
    references: tuple[UsedReference, ...]
    timings: dict[str, float]


class EncoderPipeline:
    """The encode blocks of all three tasks over one set of components."""

    def __init__(
        self, checkpoint: Path, components: dict[str, Any], media_encoder: MediaEncoder | None, comm: RankComm
    ) -> None:
        """`components` are those of the text blocks; without a `media_encoder` payloads are text alone."""
        self._comm = comm
        self._media_encoder = media_encoder
        self._side = SideStream(comm.device)
        self._looking = LookingTextBlock()
        self._text: dict[Task, ModularPipelineBlocks] = {
            Task.T2VA: MiniMaxH3TextEncoderStep(),
            Task.FL2VA: MiniMaxH3FL2VATextEncoderStep(),
            Task.REF2VA: self._looking,
        }
        self._reader = MediaReader(comm, self._look, for_vae=media_encoder is not None)
        blocks = {**self._reader.blocks, **{f"text_{task.value}": block for task, block in self._text.items()}}
        if media_encoder is not None:
            blocks, components = {**blocks, **media_encoder.blocks}, {**components, **media_encoder.components}
        self._pipeline: Pipeline = assemble(checkpoint, blocks, components, comm.device)

    def encode(
        self,
        request: EncodeRequest,
        files: tuple[Path, ...],
        go_on: Callable[[], None],
        beat: Callable[[], None],
        tell: Callable[[EncodeProgress], None],
    ) -> EncodedRequest | None:
        """Media, words and pictures to one payload, on the leader. A collective.

        `go_on` is called between the stages and raises once nobody wants the payload, `beat` within them, `tell` after
        every part.

        Raises:
            InvalidRequest: a file cannot be decoded after all; on every rank.
            PayloadError: what came out does not fit its own layout.
        """
        timings: dict[str, float] = {}
        with _timed(timings, "media"):
            media = self._reader.read(self._pipeline, request, files, beat)
        tell(EncodeProgress(stage="media"))
        go_on()
        state = media.state()
        # Nothing waits for the words before the payload: the pictures' large kernels begin beside them.
        with _timed(timings, "text"), self._side.aside():
            run_block(self._text[request.task], self._pipeline, state)
        tell(EncodeProgress(stage="text"))
        go_on()
        latents = None
        if self._media_encoder is not None:
            tile = _telling(self._media_encoder.tiles(state), beat, tell)
            with _timed(timings, "vae"):
                latents = self._media_encoder.encode(self._pipeline, request, state, tile)
        go_on()
        self._side.join(state.get("prompt_embeds"))
        if not self._comm.is_leader:
            return None
        with _timed(timings, "pack"):
            payload = _packed(state, latents)
        return EncodedRequest(payload, media.used, timings)

    def _look(self, pipeline: Pipeline, reference: Reference) -> Vision:
        # Where the words are read: what was seen is let go of there, too.
        with self._side.aside():
            return self._looking.look(pipeline, reference)


def _telling(
    tiles: Sequence[int], beat: Callable[[], None], tell: Callable[[EncodeProgress], None]
) -> Callable[[], None]:
    """`beat` for the end of every batch of `tiles`, which tells how many are done."""
    if not tiles:
        return beat
    total, done = sum(tiles), itertools.accumulate(tiles)

    def tile() -> None:
        beat()
        # The sound of the last reference may be yet to come.
        tell(EncodeProgress(stage="vae", done=min(next(done, total), total - 1), of=total))

    return tile


def _packed(state: PipelineState, latents: Latents | None) -> Packed:
    text, roles = state.get("prompt_embeds"), state.get("text_token_tags")
    if latents is None:
        return pack(Conditions(text, roles), None)
    return pack(Conditions(text, roles, latents.visual, latents.audio), latents.layout)


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    with span(name):
        yield
    timings[name] = time.perf_counter() - start
