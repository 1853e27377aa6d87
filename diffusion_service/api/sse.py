"""Server-sent events: how a change of a job looks on the wire, and where a client wants to go on. Pure."""

from diffusion_service.jobs.job import Job
from diffusion_service.jobs.store import JobEvent
from shared_schema.errors import InvalidRequest
from shared_schema.videos import EventType, Phase, VideoEvent, VideoStatus

RETRY = b"retry: 1000\n\n"
"""The first thing in a stream: how long a browser waits, in ms, before it connects again."""
COMMENT = b": still here\n\n"
LAST_EVENT_ID = "last-event-id"

_TYPES: dict[VideoStatus, EventType] = {
    "queued": "video.queued",
    "in_progress": "video.in_progress",
    "completed": "video.completed",
    "failed": "video.failed",
    "cancelled": "video.cancelled",
}


def event_frame(event: JobEvent) -> bytes:
    """One change: its revision is the id to go on from."""
    shown = _shown(event.job_id, event.status, event.phase, event.progress, event.at)
    return b"id: %d\n" % event.revision + _data(shown)


def state_frame(job: Job) -> bytes:
    """How a job is that ended before its changes were kept; without an id."""
    return _data(_shown(job.id, job.status, job.phase, job.progress, job.completed_at))


def deleted_frame(job_id: str) -> bytes:
    """The job was deleted under the stream; without an id."""
    return _data(VideoEvent(type="video.deleted", video_id=job_id))


def last_event_id(text: str | None) -> int:
    """The revision that a client has seen last; 0 for a client that comes for the first time.

    Raises:
        InvalidRequest: it is no id of ours.
    """
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidRequest("Last-Event-ID is the id of an event of this stream", param="Last-Event-ID")
    return int(text)


def _shown(job_id: str, status: VideoStatus, phase: Phase, progress: int, at: float | None) -> VideoEvent:
    goes_on = status in ("queued", "in_progress")
    return VideoEvent(
        type=_TYPES[status],
        video_id=job_id,
        status=status,
        phase=phase if goes_on else None,
        progress=progress,
        at=at,
    )


def _data(event: VideoEvent) -> bytes:
    return b"data: " + event.model_dump_json().encode() + b"\n\n"
