"""Jobs to keep, and how they end."""

from collections.abc import Mapping, Sequence

from diffusion_service.jobs.job import ClipResult, Job, JobFailure, VideoPlan
from diffusion_service.jobs.store import JobStore
from diffusion_service.jobs.webhook import Webhook
from diffusion_service.scheduler import Waiting
from shared_schema.tasks import Task
from shared_schema.videos import Execution, VideoOutput

PLAN = VideoPlan(
    model="tiny",
    task=Task.T2VA,
    prompt="a red ball",
    height=64,
    width=96,
    num_frames=107,
    num_inference_steps=2,
    flow_shift=12.0,
    audio_flow_shift=3.0,
    seed=1,
)
RESULT = ClipResult(
    outputs=(VideoOutput(index=0, seed=1, frames_sha256="f" * 64, audio_sha256="a" * 64, bytes=4),),
    stage_durations={"denoise": 1.0},
    execution=Execution(
        device="cpu", torch="0", tp=1, ulysses=1, precision="fp32", attention="native", load_format="safetensors"
    ),
)
RETENTION_S = 60.0


def new_job(number: int = 0, webhook_url: str | None = None) -> Job:
    """A job that no store has yet."""
    webhook = None if webhook_url is None else Webhook(url=webhook_url)
    return Job(id=f"video_{number:032x}", sequence=0, plan=PLAN, created_at=1000.0, webhook=webhook)


async def waiting(store: JobStore) -> list[str]:
    """Ids of the jobs among which a service may choose, in order."""
    seen: list[str] = []

    def look(candidates: Sequence[Waiting], _running: Mapping[str | None, int]) -> None:
        seen.extend(each.id for each in candidates)

    assert await store.claim("nobody", 0.0, 10.0, look) is None
    return seen


def completed(job: Job) -> Job:
    """That job at its end, from wherever it was."""
    begun = job.start(1001.0) if job.status == "queued" else job
    return begun.complete(RESULT, 1002.0, RETENTION_S)


def failed(job: Job) -> Job:
    """That job without a clip."""
    return job.fail(JobFailure(code="out_of_memory", message="no room"), 1002.0, RETENTION_S)
