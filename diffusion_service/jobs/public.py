"""A job as the public API shows it. Pure; diffusion API process."""

from collections.abc import Iterable
from typing import Any, Final

from diffusion_service.jobs.job import Job, JobFailure, PlannedLora
from diffusion_service.jobs.webhook import Webhook
from shared_schema.quality import PROFILES, VideoStepCache
from shared_schema.tasks import FPS
from shared_schema.videos import Video, VideoError, VideoLora, VideoWebhook

_OF_JOB: Final = ("id", "status", "progress", "references", "attempt", "conditioning_cache", "stage_durations")
_OF_PLAN: Final = (
    "model",
    "task",
    "prompt",
    "num_frames",
    "num_inference_steps",
    "forwards",
    "flow_shift",
    "audio_flow_shift",
    "seed",
    "num_outputs",
    "quality",
)
_OF_RESULT: Final = ("outputs", "execution", "warnings", "peak_memory_mb")
"""What callers see just as it is kept, under the same names."""


def video_of(
    job: Job, *, queue_position: int | None = None, eta_seconds: float | None = None, step: int | None = None
) -> Video:
    """What is kept of the job, and beside it what only its service knows now."""
    plan, completed = job.plan, job.status == "completed"
    seconds = plan.num_frames / FPS
    return Video(
        **_as_kept(job, _OF_JOB),
        **_as_kept(plan, _OF_PLAN),
        **_made(job),
        phase=None if job.finished else job.phase,
        queue_position=queue_position,
        eta_seconds=eta_seconds,
        step=step,
        created_at=int(job.created_at),
        started_at=_whole(job.started_at),
        completed_at=_whole(job.completed_at),
        expires_at=_whole(job.expires_at),
        size=str(plan.canvas),
        seconds=f"{seconds:.3f}".rstrip("0").rstrip("."),
        fps=FPS,
        duration_s=seconds,
        step_cache=_step_cache(job),
        error=_error(job.error),
        lora=_lora(plan.lora),
        inference_time_s=_between(job.started_at, job.completed_at) if completed else None,
        file_name=f"{job.id}.mp4" if completed else None,
        webhook=_webhook(job.webhook),
    )


def _as_kept(kept: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(kept, name) for name in names}


def _made(job: Job) -> dict[str, Any]:
    """What there is to tell once the clips are made; the digests are those of output 0."""
    result = job.result
    if result is None:
        return {}
    first = result.outputs[0] if result.outputs else None
    return {
        **_as_kept(result, _OF_RESULT),
        "metrics": result.metrics if job.plan.return_stage_metrics else {},
        "frames_sha256": first and first.frames_sha256,
        "audio_sha256": first and first.audio_sha256,
    }


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)


def _lora(lora: PlannedLora | None) -> VideoLora | None:
    return None if lora is None else VideoLora(name=lora.name, scale=lora.scale, modules=lora.modules)


def _step_cache(job: Job) -> VideoStepCache | None:
    profile = PROFILES[job.plan.quality]
    if profile is None:
        return None
    skipped = None if job.result is None else sum(output.skipped_forwards for output in job.result.outputs)
    return VideoStepCache(**dict(profile), skipped_forwards=skipped)


def _webhook(webhook: Webhook | None) -> VideoWebhook | None:
    if webhook is None:
        return None
    return VideoWebhook(
        url=webhook.url,
        state=webhook.state,
        attempts=webhook.attempts,
        next_attempt_at=_whole(webhook.due_at),
        last_status=webhook.last_status,
        last_error=webhook.last_error,
        delivered_at=_whole(webhook.delivered_at),
    )


def _error(failure: JobFailure | None) -> VideoError | None:
    if failure is None:
        return None
    kind = "invalid_request_error" if failure.code in ("invalid_input", "cancelled") else "server_error"
    return VideoError(code=failure.code, message=failure.message, param=failure.param, type=kind)
