"""What became of jobs and how long each part took, as Prometheus metrics. Runs in the diffusion API process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diffusion_service.jobs.job import Job
from shared_schema.errors import JobErrorCode
from shared_schema.tasks import FPS, Task
from shared_schema.videos import FINAL

PHASES: Final = ("encode", "transfer", "prepare", "denoise", "audio_decode", "video_decode", "mux")
"""Parts of a job, in order; each is a name of `stage_durations`. They do not overlap, but that a file is finished
(`mux`) beside the next output, or the next job."""
_FORWARD_S: Final = tuple(step * 10.0**power for power in (-2, -1, 0, 1) for step in (1, 2, 5))
_PHASE_S: Final = (*_FORWARD_S, 100.0, 200.0, 500.0, 1000.0, 3600.0)
_WAIT_S: Final = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600)


class JobAccounts:
    """The jobs that this service brought to their end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter("h3_jobs_ended", "Jobs that ended.", ["task", "status"], registry=registry)
        self._failures = Counter("h3_job_failures", "Jobs that failed, by code.", ["code"], registry=registry)
        self._waits = Histogram(
            "h3_job_queue_seconds", "From acceptance to in progress.", buckets=_WAIT_S, registry=registry
        )
        self._whole = Histogram(
            "h3_job_seconds", "From in progress to completed.", ["task"], buckets=_PHASE_S, registry=registry
        )
        self._phases = Histogram(
            "h3_phase_seconds", "Parts of completed jobs.", ["task", "phase"], buckets=_PHASE_S, registry=registry
        )
        self._forwards = Counter("h3_forwards", "DiT forwards that are finished.", ["task"], registry=registry)
        self._skipped = Counter(
            "h3_forwards_skipped", "DiT forwards that ended after their first block.", ["task"], registry=registry
        )
        self._forward = Histogram(
            "h3_forward_seconds",
            "One DiT forward and its scheduler step, on the leader.",
            ["task"],
            buckets=_FORWARD_S,
            registry=registry,
        )
        self._made = Counter("h3_video_seconds", "Length of the clips made.", ["task"], registry=registry)
        self._peak = Gauge("h3_job_peak_memory_bytes", "GPU memory of the newest job, most of it.", registry=registry)
        # A counter that first shows as 1 has not risen, for Prometheus: those that alerts look at begin with 0.
        for task in Task:
            self._forwards.labels(task.value)
            for end in FINAL:
                self._ended.labels(task.value, end)
        for code in get_args(JobErrorCode):
            self._failures.labels(code)

    def forward(self, task: Task, seconds: float, *, skipped: bool) -> None:
        """A step of a clip is finished; one that was skipped says nothing about how long a forward takes."""
        self._forwards.labels(task.value).inc()
        if skipped:
            self._skipped.labels(task.value).inc()
            return
        self._forward.labels(task.value).observe(seconds)

    def ended(self, job: Job) -> None:
        """A job is final."""
        task = job.plan.task.value
        self._ended.labels(task, job.status).inc()
        if job.error is not None:
            self._failures.labels(job.error.code).inc()
        if job.started_at is not None:
            self._waits.observe(max(job.started_at - job.created_at, 0.0))
        if job.result is None or job.started_at is None or job.completed_at is None:
            return
        self._whole.labels(task).observe(job.completed_at - job.started_at)
        self._made.labels(task).inc(job.plan.num_frames / FPS * job.plan.num_outputs)
        if job.result.peak_memory_mb is not None:
            self._peak.set(job.result.peak_memory_mb * 2**20)
        for phase in PHASES:
            seconds = job.stage_durations.get(phase, 0.0)
            if seconds > 0:  # what another job had encoded took nothing
                self._phases.labels(task, phase).observe(seconds)


@dataclass(frozen=True)
class QueueState:
    """How much there is to do. `queued` is as the store had it a second ago, whichever service works on the jobs."""

    queued: int
    limit: int
    under_way: int


class QueueCollector(Collector):
    """The queue, looked at when somebody asks."""

    def __init__(self, state: Callable[[], QueueState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Gauges of now."""
        state = self._state()
        yield GaugeMetricFamily("h3_queue_jobs", "Queued jobs, as the store had it a second ago.", state.queued)
        yield GaugeMetricFamily("h3_queue_limit", "Queued jobs at which a POST is refused.", state.limit)
        yield GaugeMetricFamily(
            "h3_jobs_under_way", "Jobs that this service encodes, keeps encoded, or makes.", state.under_way
        )
