"""One job as plain data, and the only ways in which it may change. No clock, no IO: `now` is an argument.

queued --start--> in_progress --advance*--> in_progress --complete--> completed
  |                 |   |  `--requeue--> queued                        (once, attempt 2)
  |                 |   `--fail--> failed
  `--cancel---------`--cancel--> cancelled

A diffusion service takes a queued job with `claimed` and owns it until it ends, is requeued or `released`.
"""

from collections.abc import Callable
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from diffusion_service.jobs.webhook import Webhook
from shared_schema.encode import ReferenceKind, UsedReference
from shared_schema.errors import JobErrorCode
from shared_schema.quality import Quality
from shared_schema.tasks import Canvas, Task
from shared_schema.trace import Span
from shared_schema.videos import FINAL, Execution, Phase, VideoOutput, VideoStatus

MAX_ATTEMPTS = 2
RETRIED: frozenset[str] = frozenset({"worker_died", "transfer_failed"})

CacheUse = Literal["hit", "miss"]
"""Whether a job's conditioning was there already, from an equal one before it."""


class Stored(BaseModel):
    """Base of what the job store keeps: frozen, and unknown keys mean a newer program wrote it.

    A new field has a default, for the jobs that are there. After a release it comes with a migration step, an empty one
    if need be: by it an older program refuses the database at start, instead of failing at the first job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class PlannedReference(Stored):
    """One uploaded file, as the probe at POST saw it."""

    kind: ReferenceKind
    file: str
    """Name inside the job's input folder."""
    sha256: str
    bytes: int
    use_audio: bool = True
    start_seconds: float = 0.0
    width: int | None = None
    height: int | None = None
    """Pixels, upright."""
    frames: int | None = None
    seconds: float | None = None
    has_audio: bool = False


class PlannedLora(Stored):
    """The adapter that the clips are made with."""

    name: str
    scale: float
    modules: int
    file: str | None = None
    """Chosen by the request. None: the one that the service was started with."""


class VideoPlan(Stored):
    """A request with nothing left open: what encoder and ranks will do."""

    model: str
    task: Task
    prompt: str
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    """Sigma points; forwards are one fewer."""
    flow_shift: float
    audio_flow_shift: float
    seed: int
    """Of output 0."""
    num_outputs: int = 1
    keyframes: tuple[Literal[0, -1], ...] = ()
    references: tuple[PlannedReference, ...] = ()
    encoder_output: str | None = None
    """Name of a safetensors file in the input folder that replaces encoding."""
    lora: PlannedLora | None = None
    quality: Quality = "lossless"
    user: str | None = None
    return_stage_metrics: bool = False

    @property
    def forwards(self) -> int:
        """DiT evaluations."""
        return self.num_inference_steps - 1

    def seed_of(self, index: int) -> int:
        """Of output `index`: one more for each, from the last int64 on to the first."""
        return (self.seed + index + 2**63) % 2**64 - 2**63

    @property
    def canvas(self) -> Canvas:
        """Size of the clip."""
        return Canvas(self.height, self.width)


class ClipResult(Stored):
    """What the ranks made: the file is in place when this exists."""

    outputs: tuple[VideoOutput, ...]
    stage_durations: dict[str, float]
    execution: Execution
    warnings: tuple[str, ...] = ()
    peak_memory_mb: float | None = None
    metrics: dict[str, float] = {}


class JobFailure(Stored):
    """Why a job ended without a clip."""

    code: JobErrorCode
    message: str
    param: str | None = None


class Transition(Exception):
    """A job was asked to change in a way that its state does not allow."""


class LeaseLost(Transition):
    """A service changes a job that it does not own, or does not own any more: another one has it."""


class Job(Stored):
    """One job, whole. Times are Unix seconds."""

    id: str
    """`video_` and 32 hex digits."""
    sequence: int
    """Order of acceptance; 0 until the store gives one."""
    revision: int = 0
    """Of the last event of its history; 0 until the store gives one."""
    priority: int = 0
    """Higher goes first."""
    key: str | None = None
    """Name of the API key that it belongs to; None where there are no keys."""
    owner: str | None = None
    """The instance of the diffusion service that works on it."""
    cancel_requested: bool = False
    """Its caller does not want it any more, and its owner has not stopped yet."""
    webhook: Webhook | None = None
    plan: VideoPlan
    status: VideoStatus = "queued"
    phase: Phase = "queued"
    progress: int = 0
    attempt: int = 1
    created_at: float
    started_at: float | None = None
    completed_at: float | None = None
    expires_at: float | None = None
    references: tuple[UsedReference, ...] = ()
    conditioning_cache: CacheUse | None = None
    """None until it is encoded, and where nothing is kept."""
    stage_durations: dict[str, float] = {}
    error: JobFailure | None = None
    result: ClipResult | None = None
    spans: tuple[Span, ...] = ()
    """What took time in its last attempt; none before it has ended."""

    @property
    def request_id(self) -> str:
        """32 hex digits that name this job between the services."""
        return self.id.removeprefix("video_")

    @property
    def finished(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in FINAL

    def _changed(self, **changes: object) -> Self:
        return self.model_validate({**dict(self), **changes})

    def _end(self, now: float, retention_s: float) -> dict[str, object]:
        """What every end of a job has in common."""
        webhook = self.webhook and self.webhook.due(now)
        freed = {"owner": None, "cancel_requested": False}
        return {"completed_at": now, "expires_at": now + retention_s, "webhook": webhook, **freed}

    def claimed(self, instance: str) -> Self:
        """That instance takes it; it stays queued until a worker touches it."""
        if self.status != "queued" or self.owner is not None:
            raise Transition(f"job {self.id} is {self.status}, owned by {self.owner}")
        return self._changed(owner=instance)

    def released(self) -> Self:
        """Given back before it began."""
        if self.status != "queued":
            raise Transition(f"job {self.id} is {self.status}, not queued")
        return self._changed(owner=None)

    def orphaned(self, failure: JobFailure, now: float, retention_s: float) -> Self:
        """Its owner is gone: it begins again, once, unless nobody wants it any more."""
        if self.cancel_requested:
            return self.cancel(now, retention_s)
        if self.status == "queued":
            return self.released()
        return self.requeue() if self.may_retry(failure) else self.fail(failure, now, retention_s)

    def traced(self, spans: tuple[Span, ...]) -> Self:
        """Its end comes with what took time."""
        return self._changed(spans=spans)

    def start(self, now: float) -> Self:
        """The first worker touches it."""
        if self.status != "queued":
            raise Transition(f"job {self.id} is {self.status}, not queued")
        return self._changed(status="in_progress", started_at=now)

    def advance(self, phase: Phase, progress: int) -> Self:
        """What is finished of it, in percent of all work. Progress never falls, and 100 belongs to `complete`."""
        if self.status != "in_progress":
            raise Transition(f"job {self.id} is {self.status}, not in progress")
        return self._changed(phase=phase, progress=max(self.progress, min(progress, 99)))

    def encoded(
        self, references: tuple[UsedReference, ...], durations: dict[str, float], cache: CacheUse | None = None
    ) -> Self:
        """What the encoder used and how long it took, or that it was not asked again."""
        durations = {**self.stage_durations, **durations}
        return self._changed(references=references, stage_durations=durations, conditioning_cache=cache)

    def complete(self, result: ClipResult, now: float, retention_s: float) -> Self:
        """The file can be read."""
        if self.status != "in_progress":
            raise Transition(f"job {self.id} is {self.status}, not in progress")
        durations = {**self.stage_durations, **result.stage_durations}
        return self._changed(
            status="completed",
            phase="muxing",
            progress=100,
            result=result,
            stage_durations=durations,
            **self._end(now, retention_s),
        )

    def fail(self, failure: JobFailure, now: float, retention_s: float) -> Self:
        """It ended without a clip."""
        if self.finished:
            raise Transition(f"job {self.id} is {self.status}")
        return self._changed(status="failed", error=failure, **self._end(now, retention_s))

    def may_retry(self, failure: JobFailure) -> bool:
        """Whether this failure is worth the one retry."""
        return failure.code in RETRIED and self.attempt < MAX_ATTEMPTS

    def requeue(self) -> Self:
        """Back to the queue at its old place, from the start, as the next attempt."""
        if self.status != "in_progress":
            raise Transition(f"job {self.id} is {self.status}, not in progress")
        begun = {"status": "queued", "phase": "queued", "progress": 0, "started_at": None, "owner": None}
        return self._changed(**begun, attempt=self.attempt + 1)

    def put_back(self) -> Self:
        """Back to the queue at its old place, as if it had not begun: this service stops, and that is not its fault."""
        return self.requeue()._changed(attempt=self.attempt)

    def handed_back(self) -> Self:
        """Back to the queue at its old place, for whoever can go on with it."""
        return self.released() if self.status == "queued" else self.put_back()

    def cancel(self, now: float, retention_s: float) -> Self:
        """The caller does not want it any more."""
        if self.finished:
            raise Transition(f"job {self.id} is {self.status}")
        return self._changed(status="cancelled", **self._end(now, retention_s))

    def ask_cancel(self, now: float, retention_s: float) -> Self:
        """Cancel it if nobody works on it; else leave word for its owner."""
        if self.finished or self.owner is None:
            return self.cancel(now, retention_s)
        return self._changed(cancel_requested=True)

    def hooked(self, change: Callable[[Webhook], Webhook]) -> Self:
        """Its webhook went on."""
        return self if self.webhook is None else self._changed(webhook=change(self.webhook))
