"""One job's trace: spans of both services while it is made, and its picture for Chrome. Diffusion API process."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from diffusion_service.jobs.job import Job
from shared_runtime.tracing import Errand, Recorder, working_for
from shared_schema.trace import Span, TraceParent

PROCESS = "diffusion-api"


class JobTrace:
    """Gathers what takes time while one job is under way here."""

    def __init__(self, job: Job) -> None:
        self._id = job.request_id
        self._created = job.created_at
        self._root = secrets.token_hex(8)
        self._recorder = Recorder(PROCESS)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """What runs inside is a part of the job."""
        with working_for(Errand(self._id, TraceParent(self._id, self._root)), self._recorder):
            yield

    def ended(self, job: Job, now: float) -> tuple[Span, ...]:
        """Everything that was measured, the job as a whole and its wait in the queue first."""

        def of_job(own: str, parent: str | None, name: str, until: float) -> Span:
            seconds = max(until - self._created, 0.0)
            return Span(id=own, parent=parent, name=name, process=PROCESS, begin=self._created, seconds=seconds)

        whole = of_job(self._root, None, f"job {job.plan.task}", now)
        queued = of_job(secrets.token_hex(8), self._root, "queued", job.started_at or now)
        return whole, queued, *self._recorder.spans


def chrome(job: Job, spans: Sequence[Span]) -> dict[str, object]:
    """The trace in Chrome's JSON form, for `chrome://tracing` and ui.perfetto.dev; times in microseconds."""
    rows = {name: number for number, name in enumerate(dict.fromkeys(span.process for span in spans), start=1)}
    named = [
        {"name": "process_name", "ph": "M", "pid": row, "tid": 1, "args": {"name": name}} for name, row in rows.items()
    ]
    first = min((span.begin for span in spans), default=0.0)
    # Longer ones first: of two that begin together, the viewer draws the later one inside the earlier.
    ordered = sorted(spans, key=lambda span: (span.begin, -span.seconds))
    drawn = [
        {
            "name": span.name,
            "cat": "h3",
            "ph": "X",
            "ts": round((span.begin - first) * 1e6),
            "dur": round(span.seconds * 1e6),
            "pid": rows[span.process],
            "tid": 1,
            "args": {"span": span.id, "parent": span.parent},
        }
        for span in ordered
    ]
    about = {"video": job.id, "status": job.status, "trace": job.request_id, "began": first}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*named, *drawn]}
