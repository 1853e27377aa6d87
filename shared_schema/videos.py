"""The public shapes of `/v1/videos`: what a caller sends and what a job looks like from outside."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shared_schema.encode import UsedReference
from shared_schema.tasks import Task

VideoStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
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


class Execution(PublicShape):
    """What a digest depends on besides the request."""

    device: str
    torch: str
    tp: int
    ulysses: int
    precision: str
    attention: str
    load_format: str


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
    quality: str = "lossless"
    error: VideoError | None = None
    references: tuple[UsedReference, ...] = ()
    attempt: int = 1
    num_outputs: int = 1
    lora: str | None = None
    conditioning_cache: str | None = None
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


class VideoDeleted(PublicShape):
    """The answer of DELETE."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True
