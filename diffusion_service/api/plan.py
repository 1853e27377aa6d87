"""From a proved request and probed media to a `VideoPlan` with nothing left open. Pure; runs in the API process."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from diffusion_service.api.fields import Fields, Source
from diffusion_service.api.limits import ServerLimits
from diffusion_service.api.lora import ChosenLora, check_contract, defaults_with
from diffusion_service.api.uploads import UploadedFile
from diffusion_service.jobs.job import PlannedReference, VideoPlan
from shared_runtime.media import Probe
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest, ModelNotFound
from shared_schema.layout import Layout
from shared_schema.tasks import (
    DEFAULT_FRAMES,
    Canvas,
    Task,
    aspect_ratio,
    canvas_for_ratio,
    canvas_for_size,
    frames_for_count,
    frames_for_seconds,
)
from shared_schema.videos import CreateVideo, ExtraParams, Target

V = TypeVar("V")
R = TypeVar("R")
Spelling = tuple[str, V | None]
"""A field's name and its value, None where it is absent."""

_NO_OPINION = ("auto", "adaptive")


@dataclass(frozen=True)
class Reference:
    """One reference whose content is known."""

    source: Source
    file: UploadedFile
    kind: ReferenceKind
    probe: Probe


def check_model(create: CreateVideo, limits: ServerLimits) -> str:
    """The name under which the job runs.

    Raises:
        ModelNotFound: it is none of ours.
    """
    name = limits.served_names[0] if create.model is None else create.model
    if name not in limits.served_names:
        served = ", ".join(limits.served_names)
        raise ModelNotFound(f"there is no model {name[:200]!a}; this server has {served}", param="model")
    return name


def check_prompt(create: CreateVideo, *, optional: bool) -> None:
    """Refuse a prompt without a word.

    Raises:
        InvalidRequest: absent, or nothing but spaces.
    """
    if create.prompt is None and optional:
        return
    if create.prompt is None or not create.prompt.strip():
        raise InvalidRequest("prompt is not empty", param="prompt")


def choose_task(create: CreateVideo, kinds: Sequence[tuple[str, ReferenceKind]], limits: ServerLimits) -> Task:
    """The task that was asked for, or the one that the media implies; its counts are proved. `kinds`: param, kind.

    Raises:
        InvalidRequest: the task is not served, or its media do not fit it; `param` names the first that does not.
    """
    task = _extra(create).task or _implied([kind for _, kind in kinds])
    if task not in limits.tasks:
        served = ", ".join(sorted(limits.tasks))
        why = "" if limits.lora is None else f", because of its adapter {limits.lora.adapter.name}"
        raise InvalidRequest(f"this server makes {served}, not {task}{why}", param="extra_params.task")
    match task:
        case Task.T2VA:
            for param, kind in kinds:
                raise InvalidRequest(f"t2va takes no media, {param} is one {kind}", param=param)
        case Task.FL2VA:
            _check_keyframes(kinds)
        case Task.REF2VA:
            _check_references(kinds, limits)
    return task


def _implied(kinds: list[ReferenceKind]) -> Task:
    if not kinds:
        return Task.T2VA
    return Task.FL2VA if set(kinds) == {"image"} and len(kinds) <= 2 else Task.REF2VA


def _check_keyframes(kinds: Sequence[tuple[str, ReferenceKind]]) -> None:
    if not kinds:
        raise InvalidRequest("fl2va takes one or two images, none came", param="input_reference")
    for number, (param, kind) in enumerate(kinds):
        if kind != "image" or number >= 2:
            found = f"is one {kind}" if kind != "image" else "is one more"
            raise InvalidRequest(f"fl2va takes one or two images; reference {number} {found}", param=param)


def _check_references(kinds: Sequence[tuple[str, ReferenceKind]], limits: ServerLimits) -> None:
    rules = limits.references
    most: dict[ReferenceKind, int] = {"image": rules.images, "video": rules.videos, "audio": rules.audios}
    count: Counter[ReferenceKind] = Counter()
    for number, (param, kind) in enumerate(kinds):
        count[kind] += 1
        if count[kind] > most[kind]:
            raise InvalidRequest(
                f"ref2va takes at most {most[kind]} {kind}s; reference {number} is one more", param=param
            )
        if number >= rules.total:
            raise InvalidRequest(f"ref2va takes at most {rules.total} references together", param=param)
    if not count["image"] and not count["video"]:
        param = kinds[0][0] if kinds else "input_references"
        raise InvalidRequest("ref2va takes at least one image or video", param=param)


def start_seconds(create: CreateVideo) -> Spelling[float]:
    """Where references begin that say nothing themselves, and the field that says so."""
    extra = _extra(create)
    spellings = [
        ("start_time_seconds", create.start_time_seconds),
        ("extra_params.start_time_seconds", extra.start_time_seconds),
    ]
    value = _agreed(spellings, lambda seconds: seconds)
    return next((name for name, given in spellings if given is not None), "start_time_seconds"), value


def plan_video(
    fields: Fields,
    task: Task,
    references: Sequence[Reference],
    limits: ServerLimits,
    drawn: int,
    lora: ChosenLora | None = None,
) -> VideoPlan:
    """The plan of a request whose media the encoder will read. `drawn` is the seed of a request that says -1.

    Raises:
        InvalidRequest: fields that do not go together; `param` names one of them.
    """
    create = fields.create
    return VideoPlan(
        task=task,
        keyframes=_keyframes(create, task, len(references)),
        references=tuple(_planned(create, reference) for reference in references),
        **_common(create, limits, drawn, lora),
        **_geometry(_canvas(create, task, references, limits), _frames(create) or DEFAULT_FRAMES),
    )


def plan_payload(
    fields: Fields,
    payload: UploadedFile,
    layout: Layout,
    kinds: Sequence[ReferenceKind],
    limits: ServerLimits,
    drawn: int,
    lora: ChosenLora | None = None,
) -> VideoPlan:
    """The plan of a request that brings its own `encoder_output`; whatever else it says must agree with its layout.

    Raises:
        InvalidRequest: it does not agree; `param` names the field.
    """
    create = fields.create
    for param, value, has in _claims(create, layout.task, limits):
        if value is not None and value != has(layout):
            raise InvalidRequest(f"{param} is not what encoder_output was made for: {has(layout)}", param=param)
    if kinds and Counter(kinds) != Counter(block.medium for block in layout.blocks):
        raise InvalidRequest("the media are not those of encoder_output", param=fields.sources[0].param)
    return VideoPlan(
        task=layout.task,
        keyframes=_as_ends(layout.keyframes),
        encoder_output=payload.path.name,
        **_common(create, limits, drawn, lora),
        **_geometry(Canvas(layout.height, layout.width), layout.num_frames),
    )


def _claims(
    create: CreateVideo, task: Task, limits: ServerLimits
) -> list[tuple[str, object, Callable[[Layout], object]]]:
    size = next((name for name, value in _canvas_spellings(create, limits) if value is not None), "size")
    asked = _asked_canvas(create, limits)
    length = next((name for name, value in _length_spellings(create) if value is not None), "seconds")
    return [
        ("extra_params.task", _extra(create).task, lambda layout: layout.task),
        (length, _frames(create), lambda layout: layout.num_frames),
        (size, None if _image_decides(create, task) else asked, lambda layout: Canvas(layout.height, layout.width)),
        ("extra_params.frame_indices", _ends(create), lambda layout: layout.keyframes),
    ]


def _common(create: CreateVideo, limits: ServerLimits, drawn: int, lora: ChosenLora | None) -> dict[str, object]:
    extra, defaults = _extra(create), limits.defaults
    flow = [("flow_shift", create.flow_shift), ("extra_params.flow_shift", extra.flow_shift)]
    audio = [("audio_flow_shift", create.audio_flow_shift), ("extra_params.audio_flow_shift", extra.audio_flow_shift)]
    seed = defaults.seed if create.seed is None else create.seed
    if lora is not None and lora.contract is not None:
        check_contract([("num_inference_steps", create.num_inference_steps), *flow, *audio], lora.contract)
        defaults, _ = defaults_with(defaults, lora.contract)
    return {
        "model": check_model(create, limits),
        "prompt": create.prompt or "",
        "num_inference_steps": create.num_inference_steps or defaults.num_inference_steps,
        "flow_shift": _agreed(flow, float) or defaults.flow_shift,
        "audio_flow_shift": _agreed(audio, float) or defaults.audio_flow_shift,
        "seed": drawn if seed == -1 else seed,
        "num_outputs": create.num_outputs_per_prompt or 1,
        "lora": None if lora is None else lora.planned,
        "quality": create.quality or "lossless",
        "user": create.user,
        "return_stage_metrics": create.return_stage_metrics or False,
    }


def _geometry(canvas: Canvas, frames: int) -> dict[str, int]:
    return {"height": canvas.height, "width": canvas.width, "num_frames": frames}


def _planned(create: CreateVideo, reference: Reference) -> PlannedReference:
    source, probe = reference.source, reference.probe
    start = start_seconds(create)[1] if source.start_seconds is None else source.start_seconds
    return PlannedReference(
        kind=reference.kind,
        file=reference.file.path.name,
        sha256=reference.file.sha256,
        bytes=reference.file.bytes,
        use_audio=source.use_audio is not False,
        start_seconds=0.0 if reference.kind == "image" else start or 0.0,
        width=probe.width,
        height=probe.height,
        frames=probe.frames,
        seconds=probe.seconds,
        has_audio=probe.has_audio,
    )


def _extra(create: CreateVideo) -> ExtraParams:
    return create.extra_params or ExtraParams()


def _target(create: CreateVideo) -> Target:
    return _extra(create).target or Target()


def _agreed(spellings: Sequence[Spelling[V]], resolve: Callable[[V], R]) -> R | None:
    """What all given spellings resolve to; None where none is given."""
    found: tuple[str, R] | None = None
    for param, value in spellings:
        if value is None:
            continue
        try:
            resolved = resolve(value)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from error
        if found is not None and found[1] != resolved:
            raise InvalidRequest(f"{found[0]} and {param} disagree: {found[1]} and {resolved}", param=param)
        found = found or (param, resolved)
    return None if found is None else found[1]


def _length_spellings(create: CreateVideo) -> list[Spelling[Callable[[], int]]]:
    extra = _extra(create)
    seconds = [
        ("seconds", create.seconds),
        ("extra_params.duration", extra.duration),
        ("extra_params.duration_seconds", extra.duration_seconds),
        ("extra_params.target.duration_seconds", _target(create).duration_seconds),
    ]
    count = create.num_frames
    spelled: list[Spelling[Callable[[], int]]] = [
        (param, None if value is None else partial(frames_for_seconds, value)) for param, value in seconds
    ]
    return [*spelled, ("num_frames", None if count is None else partial(frames_for_count, count))]


def _frames(create: CreateVideo) -> int | None:
    return _agreed(_length_spellings(create), lambda count: count())


def _canvas_spellings(create: CreateVideo, limits: ServerLimits) -> list[Spelling[Callable[[], Canvas]]]:
    """Explicit sizes first, then ratios; `auto` is a ratio only where nothing else is said."""
    width, height, size = create.width, create.height, create.size
    if (width is None) != (height is None):
        given = "width" if height is None else "height"
        raise InvalidRequest("width and height come together", param=given)
    spelled: list[Spelling[Callable[[], Canvas]]] = []
    if size is not None:
        wide, high = (int(side) for side in size.split("x"))
        spelled.append(("size", partial(canvas_for_size, wide, high, limits.canvas)))
    if width is not None and height is not None:
        spelled.append(("width", partial(canvas_for_size, width, height, limits.canvas)))
    ratios = [(param, ratio) for param, ratio in _ratio_spellings(create) if ratio is not None]
    said = [(param, ratio) for param, ratio in ratios if ratio.strip().lower() not in _NO_OPINION]
    for param, ratio in said or ([] if spelled else ratios):
        spelled.append((param, partial(_ratio_canvas, ratio, limits)))
    return spelled


def _ratio_canvas(ratio: str, limits: ServerLimits) -> Canvas:
    return canvas_for_ratio(*aspect_ratio(ratio), limits.canvas)


def _ratio_spellings(create: CreateVideo) -> list[Spelling[str]]:
    return [
        ("aspect_ratio", create.aspect_ratio),
        ("extra_params.aspect_ratio", _extra(create).aspect_ratio),
        ("extra_params.target.aspect_ratio", _target(create).aspect_ratio),
    ]


def _asked_canvas(create: CreateVideo, limits: ServerLimits) -> Canvas | None:
    edges = [("short_edge", create.short_edge), ("extra_params.target.short_edge", _target(create).short_edge)]
    for param, edge in edges:
        if edge is not None and edge != limits.canvas.short_edge:
            raise InvalidRequest(f"{param} is {limits.canvas.short_edge}, not {edge}", param=param)
    return _agreed(_canvas_spellings(create, limits), lambda canvas: canvas())


def _image_decides(create: CreateVideo, task: Task) -> bool:
    """Whether the first image gives the canvas: a lone ratio is accepted and unused."""
    return task is Task.FL2VA and create.size is None and create.width is None


def _canvas(create: CreateVideo, task: Task, references: Sequence[Reference], limits: ServerLimits) -> Canvas:
    asked = _asked_canvas(create, limits)
    if _image_decides(create, task):
        first = references[0]
        sides: list[Spelling[tuple[int, int]]] = [
            (first.source.param, (first.probe.width or 0, first.probe.height or 0))
        ]
        asked = _agreed(sides, lambda side: canvas_for_ratio(*side, limits.canvas))
    return asked or canvas_for_ratio(16, 9, limits.canvas)


def _ends(create: CreateVideo) -> tuple[int, ...] | None:
    extra = _extra(create)
    spellings = [
        ("extra_params.frame_indices", extra.frame_indices),
        ("extra_params.frame_index", extra.frame_index),
        ("extra_params.target.frame_indices", _target(create).frame_indices),
    ]
    return _agreed(spellings, lambda ends: ends)


def _keyframes(create: CreateVideo, task: Task, images: int) -> tuple[Literal[0, -1], ...]:
    ends = _ends(create)
    if task is not Task.FL2VA:
        if ends is not None:
            raise InvalidRequest(f"{task} has no keyframes", param="extra_params.frame_indices")
        return ()
    if ends is not None and len(ends) != images:
        raise InvalidRequest(f"frame_indices names {len(ends)} of {images} images", param="extra_params.frame_indices")
    return _as_ends(ends or (0, -1)[:images])


def _as_ends(ends: Sequence[int]) -> tuple[Literal[0, -1], ...]:
    return tuple(0 if end == 0 else -1 for end in ends)
