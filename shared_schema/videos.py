"""The public shapes of `/v1/videos`: what a caller sends and what a job looks like from outside."""

import json
import math
import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shared_schema.encode import UsedReference
from shared_schema.quality import Quality, VideoStepCache
from shared_schema.tasks import FPS, MAX_SIGMA_POINTS, MIN_SIGMA_POINTS, Task

VideoStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
FINAL: tuple[VideoStatus, ...] = ("completed", "failed", "cancelled")
"""A job in one of these changes no more."""
MAX_OUTPUTS = 10
"""Clips of one job."""
Phase = Literal["queued", "encoding", "transferring", "denoising", "decoding", "muxing"]


class PublicShape(BaseModel):
    """Base of what leaves through the public API."""

    model_config = ConfigDict(frozen=True)


class VideoError(PublicShape):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None
    type: str | None = None


class VideoOutput(PublicShape):
    """One finished clip of a job and its reproducibility digests."""

    index: int
    seed: int
    frames_sha256: str
    """Of the uint8 RGB frames x height x width x 3, before the MP4 encoder."""
    audio_sha256: str
    """Of the float32 `[2, samples]` waveform as the audio VAE made it, before trimming."""
    bytes: int
    """Size of the MP4."""
    skipped_forwards: int = 0
    """Of the job's `forwards`, for `quality: high`."""


class Execution(PublicShape):
    """What a digest depends on besides the request."""

    device: str
    torch: str
    tp: int
    ulysses: int
    precision: str
    attention: str
    load_format: str


class VideoLora(PublicShape):
    """The adapter that a job's transformer has."""

    name: str
    scale: float
    modules: int
    """Of the transformer, that it changes; every tensor of its file is bound."""


class VideoWebhook(PublicShape):
    """How far the end of a job has been told. Times are Unix seconds."""

    url: str
    state: Literal["pending", "delivered", "failed"]
    attempts: int
    next_attempt_at: int | None
    """None while the job goes on, and once the delivery has ended."""
    last_status: int | None
    """HTTP status of the receiver's last answer."""
    last_error: str | None
    delivered_at: int | None


class Video(PublicShape):
    """A job as the public API shows it; a superset of the OpenAI SDK's `Video`."""

    id: str
    object: Literal["video"] = "video"
    model: str
    prompt: str | None
    status: VideoStatus
    progress: int
    """0 to 100, finished work only; 100 once the content can be read."""
    phase: Phase | None
    queue_position: int | None = None
    """From 1, by priority and then by age, over all keys. Where keys take turns, a key with many jobs waits longer than
    the number says, and one with few shorter."""
    eta_seconds: float | None = None
    created_at: int
    started_at: int | None = None
    completed_at: int | None = None
    expires_at: int | None = None
    size: str
    seconds: str
    num_frames: int
    fps: int
    duration_s: float
    task: Task
    seed: int
    num_inference_steps: int
    forwards: int
    step: int | None = None
    """Forwards finished of the output that is being made; None unless it is being denoised."""
    flow_shift: float
    audio_flow_shift: float
    quality: Quality = "lossless"
    step_cache: VideoStepCache | None = None
    error: VideoError | None = None
    references: tuple[UsedReference, ...] = ()
    attempt: int = 1
    num_outputs: int = 1
    lora: VideoLora | None = None
    conditioning_cache: str | None = None
    webhook: VideoWebhook | None = None
    stage_durations: dict[str, float] = {}
    """Seconds by stage."""
    metrics: dict[str, float] = {}
    inference_time_s: float | None = None
    media_type: Literal["video/mp4"] = "video/mp4"
    file_name: str | None = None
    remixed_from_video_id: None = None
    outputs: tuple[VideoOutput, ...] = ()
    execution: Execution | None = None
    warnings: tuple[str, ...] = ()
    frames_sha256: str | None = None
    audio_sha256: str | None = None
    peak_memory_mb: float | None = None


class VideoList(PublicShape):
    """A page of jobs."""

    object: Literal["list"] = "list"
    data: tuple[Video, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


EventType = Literal[
    "video.queued", "video.in_progress", "video.completed", "video.failed", "video.cancelled", "video.deleted"
]


class VideoEvent(PublicShape):
    """One change of a job, as its event stream tells it."""

    type: EventType
    video_id: str
    status: VideoStatus | None = None
    """None where the job is gone."""
    phase: Phase | None = None
    """None once the job has ended."""
    progress: int | None = None
    at: float | None = None
    """Unix seconds."""

    @property
    def final(self) -> bool:
        """Whether no other event follows."""
        return self.type not in ("video.queued", "video.in_progress")


class VideoDeleted(PublicShape):
    """The answer of DELETE."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


def _whole(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,20}(\.0{1,6})?", value):
        return int(value.partition(".")[0])
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("is a whole number")


def _number(value: object) -> float:
    if isinstance(value, str) and re.fullmatch(
        r"[+-]?([0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20})([eE][+-]?[0-9]{1,3})?", value
    ):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**70 and math.isfinite(value):
        return float(value)
    raise ValueError("is a finite number")


def _flag(value: object) -> bool:
    known: dict[object, bool] = {"true": True, "1": True, "false": False, "0": False, 1: True, 0: False}
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, str | int) and word in known:
        return known[word]
    raise ValueError("is true or false")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("is text")


def _ratio(value: object) -> str:
    if isinstance(value, str):
        return value
    return repr(_number(value))


def _ends(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value if value.strip().startswith("[") else f"[{value}]")
        except (ValueError, RecursionError):
            value = None
    ends = tuple(_whole(end) for end in value) if isinstance(value, list | tuple) else (_whole(value),)
    if ends not in ((0,), (-1,), (0, -1)):
        raise ValueError("is [0], [-1] or [0, -1]")
    return ends


def _object(value: object) -> object:
    if isinstance(value, dict | BaseModel):
        return value
    raise ValueError("is an object")


Text = Annotated[str, BeforeValidator(_text)]
Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, also as text, as forms send it; never a boolean."""
Number = Annotated[float, BeforeValidator(_number)]
"""A finite number, also as text."""
Flag = Annotated[bool, BeforeValidator(_flag)]
Ratio = Annotated[str, BeforeValidator(_ratio)]
Shift = Annotated[Number, Field(gt=0, le=100)]
Start = Annotated[Number, Field(ge=0, le=86_400)]
Seed = Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)]
Ends = Annotated[tuple[int, ...], BeforeValidator(_ends)]


def _neutral_guidance(value: object) -> float:
    if _number(value) not in (0.0, 1.0):
        raise ValueError("is 0 or 1: this model has no guidance")
    return _number(value)


def _size(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,5}x[0-9]{1,5}", value):
        return value
    raise ValueError("is WIDTHxHEIGHT in pixels, such as 1344x768")


def _nothing(value: object) -> str:
    if value == "":
        return ""
    raise ValueError("is empty: this model has no guidance")


def _fps(value: object) -> float:
    if _number(value) != FPS:
        raise ValueError(f"is {FPS}")
    return _number(value)


def _sound(value: object) -> bool:
    if not _flag(value):
        raise ValueError("is true: a clip always has sound")
    return True


def _no_interpolation(value: object) -> bool:
    if _flag(value):
        raise ValueError("is false: frames are never interpolated")
    return False


Guidance = Annotated[float, BeforeValidator(_neutral_guidance)]


class CallerShape(BaseModel):
    """Base of what callers send: unknown names are errors, and an absent field is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MediaReference(CallerShape):
    """A reference by URL, in place of an uploaded file. Exactly one of the three URLs."""

    image_url: Text | None = None
    video_url: Text | None = None
    audio_url: Text | None = None
    use_audio: Flag | None = None
    """Whether a video's own sound comes along; true where absent."""
    start_time_seconds: Start | None = None
    """Where in the file the reference begins."""


class Target(CallerShape):
    """`extra_params.target`: another spelling of length, shape and keyframes."""

    duration_seconds: Number | None = None
    aspect_ratio: Ratio | None = None
    short_edge: Whole | None = None
    frame_indices: Ends | None = None


class ExtraParams(CallerShape):
    """`extra_params`, as callers of vLLM-Omni send it."""

    task: Task | None = None
    duration: Number | None = None
    duration_seconds: Number | None = None
    target: Annotated[Target, BeforeValidator(_object)] | None = None
    frame_index: Ends | None = None
    frame_indices: Ends | None = None
    start_time_seconds: Start | None = None
    flow_shift: Shift | None = None
    audio_flow_shift: Shift | None = None
    aspect_ratio: Ratio | None = None


class LoraChoice(CallerShape):
    """`lora`: which adapter, in every spelling that callers have. A text alone is a name."""

    name: Text | None = None
    lora_name: Text | None = None
    adapter: Text | None = None
    path: Text | None = None
    local_path: Text | None = None
    lora_path: Text | None = None
    scale: Number | None = None
    lora_scale: Number | None = None


def _lora(value: object) -> object:
    if not isinstance(value, str):
        return _object(value)
    if not value.lstrip().startswith("{"):
        return {"name": value}
    try:
        return {key: inside for key, inside in json.loads(value).items() if inside is not None}
    except (ValueError, RecursionError):
        raise ValueError("is a name, or an object with name or path, and scale") from None


class CreateVideo(CallerShape):
    """`POST /v1/videos` without its media, which travels as files or `MediaReference` beside it.

    One field at a time is proved here; how fields go together is the server's to decide.
    """

    prompt: Text | None = None
    model: Text | None = None
    seconds: Number | None = None
    """4 to 15."""
    num_frames: Whole | None = None
    """96 to 362, made 17n + 5."""
    fps: Annotated[float, BeforeValidator(_fps)] | None = None
    """24."""
    size: Annotated[str, BeforeValidator(_size)] | None = None
    """`WIDTHxHEIGHT`, pixels."""
    width: Whole | None = None
    height: Whole | None = None
    aspect_ratio: Ratio | None = None
    """`w:h` or a number between 1:4 and 4:1; `auto` and `adaptive` are 16:9, or the ratio of what is given."""
    short_edge: Whole | None = None
    """Pixels: the model's own, or it is refused."""
    num_inference_steps: Annotated[Whole, Field(ge=MIN_SIGMA_POINTS, le=MAX_SIGMA_POINTS)] | None = None
    """Sigma points: one more than DiT forwards."""
    flow_shift: Shift | None = None
    audio_flow_shift: Shift | None = None
    seed: Seed | None = None
    """-1 draws one."""
    num_outputs_per_prompt: Annotated[Whole, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    start_time_seconds: Start | None = None
    """For every video and audio reference that says nothing itself."""
    lora: Annotated[LoraChoice, BeforeValidator(_lora)] | None = None
    quality: Quality | None = None
    """lossless where absent; high skips forwards that change little."""
    return_stage_metrics: Flag | None = None
    user: Annotated[Text, Field(max_length=512)] | None = None
    priority: Annotated[Whole, Field(ge=-100, le=100)] | None = None
    """Higher goes first; 0 where absent."""
    webhook_url: Annotated[Text, Field(max_length=2048)] | None = None
    """Where the end of the job is told."""
    extra_params: Annotated[ExtraParams, BeforeValidator(_object)] | None = None

    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    negative_prompt: Annotated[str, BeforeValidator(_nothing)] | None = None
    generate_sound: Annotated[bool, BeforeValidator(_sound)] | None = None
    enable_frame_interpolation: Annotated[bool, BeforeValidator(_no_interpolation)] | None = None
    audio_mode: Literal["native", "lock_source"] | None = None
