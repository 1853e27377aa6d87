"""The media of a request: what each file really is, whether it may be used, and a caller's own payload.

Blocks and decodes; the API process calls it in a worker thread.
"""

import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from diffusion_service.api.fields import Fields, Source
from diffusion_service.api.forms import ENCODER_OUTPUT
from diffusion_service.api.limits import ServerLimits
from diffusion_service.api.plan import Reference, choose_task, start_seconds
from diffusion_service.api.room import check_bytes
from diffusion_service.api.uploads import UploadedFile
from shared_runtime.media import check_totals, classify, probe
from shared_runtime.transport.codec import check_values
from shared_runtime.transport.inline import from_safetensors
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest, NotServed, PayloadError, TooLarge
from shared_schema.layout import Block, Layout
from shared_schema.tasks import (
    CANVAS_MULTIPLE,
    VAE_RATIO,
    Canvas,
    Task,
    audio_latents,
    is_legal_canvas,
    reference_size,
    video_latents,
)


@dataclass(frozen=True)
class Media:
    """A request's references, all of them readable, and the task that they are for."""

    task: Task
    references: tuple[Reference, ...]


@dataclass(frozen=True)
class _Classified:
    source: Source
    file: UploadedFile
    kind: ReferenceKind


def inspect(fields: Fields, limits: ServerLimits) -> Media:
    """Classify every reference by content, choose the task, then probe each one and their totals.

    Raises:
        InvalidRequest: one cannot be used; `param` names its field, the message its index in the request.
        TooLarge: one is over the byte cap of its kind.
    """
    if len(fields.sources) > limits.references.total:
        extra = fields.sources[limits.references.total]
        raise InvalidRequest(f"a request has at most {limits.references.total} references", param=extra.param)
    classified = [_classify(index, source, fields, limits) for index, source in enumerate(fields.sources)]
    task = choose_task(fields.create, [(item.source.param, item.kind) for item in classified], limits)
    param, start = start_seconds(fields.create)
    if start and all(item.kind == "image" for item in classified):
        raise InvalidRequest(f"{param} is for videos and audios, and none came", param=param)
    references = tuple(_probe(index, item, task, start or 0.0, limits) for index, item in enumerate(classified))
    if task is Task.REF2VA:
        check_totals([(reference.source.param, reference.probe) for reference in references], limits.references)
    return Media(task, references)


def read_payload(file: UploadedFile, limits: ServerLimits) -> Layout:
    """Prove a caller's `encoder_output` whole, values included.

    Raises:
        InvalidRequest: it breaks a rule; the message names slot and rule.
    """
    if file.bytes == 0:
        raise InvalidRequest("encoder_output is empty", param=ENCODER_OUTPUT)
    with file.path.open("rb") as opened:
        # Not closed by hand: the traceback of a refusal still looks into it.
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        payload = from_safetensors(memoryview(mapped))
        check_values(payload)
    except PayloadError as error:
        place = f"encoder_output {error.slot}" if error.slot else "encoder_output"
        raise InvalidRequest(f"{place}: {error.message}", param=ENCODER_OUTPUT) from error
    check_bytes(payload.manifest.nbytes, limits, ENCODER_OUTPUT)
    layout, text_dim = payload.layout, payload.manifest.text_dim
    if layout is None or text_dim != limits.text_dim:
        raise InvalidRequest(f"encoder_output has {text_dim} columns, not {limits.text_dim}", param=ENCODER_OUTPUT)
    if layout.task not in limits.tasks:
        raise InvalidRequest(f"encoder_output: this server does not make {layout.task}", param=ENCODER_OUTPUT)
    canvas = Canvas(layout.height, layout.width)
    if not is_legal_canvas(canvas, limits.canvas):
        raise InvalidRequest(f"encoder_output: {canvas} is no size of this model", param=ENCODER_OUTPUT)
    _check_conditions(layout, limits)
    return layout


def _check_conditions(layout: Layout, limits: ServerLimits) -> None:
    """Refuse more conditions, or longer or larger ones, than a request's own media could have made."""
    rules = limits.references
    counts = Counter(block.medium for block in layout.blocks)
    most = {"image": rules.images, "video": rules.videos, "audio": rules.audios}
    if counts.total() > rules.total or any(counts[medium] > most[medium] for medium in counts):
        said = ", ".join(f"{count} {medium}s" for medium, count in counts.items())
        raise InvalidRequest(f"encoder_output has {said}: more than this server takes", param=ENCODER_OUTPUT)
    for number, block in enumerate(layout.blocks):
        if not _could_be_made(block, layout.num_frames, limits):
            raise InvalidRequest(
                f"encoder_output: condition {number} is larger or longer than this model reads", param=ENCODER_OUTPUT
            )


def _could_be_made(block: Block, num_frames: int, limits: ServerLimits) -> bool:
    # A sound may have one more: a last latent that is begun.
    if block.latent_t > video_latents(num_frames) or block.audio_t > audio_latents(num_frames) + 1:
        return False
    largest = prod(reference_size(1, limits.references.max_aspect, limits.canvas)) // CANVAS_MULTIPLE**2
    canvas = Canvas(block.latent_h * VAE_RATIO, block.latent_w * VAE_RATIO)
    return is_legal_canvas(canvas, limits.canvas) or (block.medium != "video" and block.visual_rows <= largest)


def payload_kinds(fields: Fields, limits: ServerLimits) -> Sequence[ReferenceKind]:
    """What the references beside an `encoder_output` are. It replaces them, so they are classified alone."""
    return [_classify(index, source, fields, limits).kind for index, source in enumerate(fields.sources)]


def _classify(index: int, source: Source, fields: Fields, limits: ServerLimits) -> _Classified:
    file = _file(source, fields)
    try:
        kind = classify(file.path)
    except InvalidRequest as error:
        raise _indexed(index, source, error) from error
    if source.kind not in (None, kind):
        raise InvalidRequest(f"reference {index} is one {kind}, not one {source.kind}", param=source.param)
    if source.use_audio is not None and kind != "video":
        raise InvalidRequest(f"reference {index}: use_audio is for videos", param=f"{source.param}.use_audio")
    caps = {"image": limits.caps.image_bytes, "video": limits.caps.video_bytes, "audio": limits.caps.audio_bytes}
    if file.bytes > caps[kind]:
        raise TooLarge(f"reference {index}: one {kind} has at most {caps[kind]} bytes", param=source.param)
    return _Classified(source, file, kind)


def _file(source: Source, fields: Fields) -> UploadedFile:
    if isinstance(source.media, UploadedFile):
        return source.media
    scheme = source.media[:8].lower()
    if scheme.startswith("data:"):
        return fields.urls.file(source.media, source.param)
    if scheme.startswith(("http://", "https://")):
        raise NotServed(f"{source.param}: media by URL is off here; send a file or a data: URL", param=source.param)
    raise InvalidRequest(f"{source.param} is a file or a data: URL", param=source.param)


def _probe(index: int, item: _Classified, task: Task, start: float, limits: ServerLimits) -> Reference:
    source = item.source
    inherited = 0.0 if item.kind == "image" else start
    try:
        probed = probe(
            item.file.path,
            kind=item.kind,
            role="keyframe" if task is Task.FL2VA else "reference",
            limits=limits.canvas,
            param=source.param,
            caps=limits.caps,
            rules=limits.references,
            start_seconds=inherited if source.start_seconds is None else source.start_seconds,
            use_audio=source.use_audio is not False,
        )
    except InvalidRequest as error:
        raise _indexed(index, source, error) from error
    return Reference(source, item.file, item.kind, probed)


def _indexed(index: int, source: Source, error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(f"reference {index}: {error.message}", param=source.param, code=error.code)
