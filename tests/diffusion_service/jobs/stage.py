"""A runner among stand-ins that hold every phase until the test lets go."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from diffusion_service.commands import ChunkDone, Generated, Muxing, PayloadTaken, StepDone
from diffusion_service.conditioning_cache import Kept, Use
from diffusion_service.engine import result_of
from diffusion_service.handover import Landed, Watcher
from diffusion_service.jobs.accounts import JobAccounts
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.job import ClipResult, Job, VideoPlan
from diffusion_service.jobs.memory import MemoryJobStore
from diffusion_service.jobs.runner import JobRunner
from diffusion_service.jobs.workshop import RunnerRules
from shared_schema.errors import StoreUnavailable
from shared_schema.quality import Quality
from shared_schema.tasks import Task
from shared_schema.trace import Span
from shared_schema.videos import Execution, VideoOutput

EXECUTION = Execution(
    device="cpu", torch="0", tp=1, ulysses=1, precision="fp32", attention="native", load_format="safetensors"
)

LATEST_S = 60.0
"""Longer means that something waits for ever."""

Scenario = Callable[["Stage"], Awaitable[None]]

RULES = RunnerRules(
    retention_s=60,
    look_ahead=1,
    running_per_key=None,
    job_timeout_s=60,
    lease_s=30,
    encoder_ranks=2,
    diffusion_ranks=4,
)


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class HeldHandover:
    """Lands a payload once `gate` is open; `errors` are raised first, one a call."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[Exception] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    no_room: bool = False

    async def land(self, job: Job, watcher: Watcher) -> Landed:
        await asyncio.sleep(0)
        self.asked.append(job.id)
        watcher.reach("encoding")
        if self.errors:
            raise self.errors.pop(0)
        await self.gate.wait()
        try:
            while self.no_room:
                watcher.starve(True)
                await asyncio.sleep(0.001)
        finally:
            watcher.starve(False)
        watcher.reach("transferring")
        self.held.add(job.id)
        kept = Kept(job.id, None, ())  # type: ignore[arg-type]
        return Landed(Use(kept, lambda: self.held.discard(job.id)), {"encode": 0.5}, cache="miss")

    def expire(self) -> None:
        pass


@dataclass
class HeldEngine:
    """Makes a clip of two steps and two chunks, each once `gate` is open, and has its file whole once `mux` is.

    A job that waits for `mux` has closed the gate behind it.
    """

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    pauses: bool = True
    """Between two events; else they are heard of at once."""
    mux: asyncio.Event = field(default_factory=_open)
    errors: list[Exception] = field(default_factory=list)
    mux_errors: list[Exception] = field(default_factory=list)
    at_work: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)

    async def until_ready(self) -> None:
        await asyncio.sleep(0)

    async def generate(
        self, plan: VideoPlan, landing: Any, _manifest: Any, _media: Any, paths: tuple[Path, ...], hear: Any
    ) -> ClipResult:
        self.at_work.append(landing)
        self.made.append(landing)
        try:
            if self.errors:
                raise self.errors.pop(0)
            hear(PayloadTaken())
            made = []
            for index, path in enumerate(paths):
                skips = plan.quality == "high"
                steps = (StepDone(1, 2, index, 0.5), StepDone(2, 2, index, 0.5, skips))
                for event in (*steps, ChunkDone(1, 2, index), ChunkDone(2, 2, index), Muxing(index)):
                    await self.gate.wait()
                    hear(event)
                    if self.pauses:
                        await asyncio.sleep(0)
                if index == len(paths) - 1 and not self.mux.is_set():
                    self.gate.clear()
                    await self.mux.wait()
                if self.mux_errors:
                    raise self.mux_errors.pop(0)
                path.write_bytes(b"clip")
                digests = {"frames_sha256": "f" * 64, "audio_sha256": "a" * 64}
                made.append(
                    VideoOutput(index=index, seed=plan.seed_of(index), bytes=4, skipped_forwards=int(skips), **digests)
                )
            return result_of(plan, Generated(tuple(made), {"denoise": 1.0}, (), None), EXECUTION)
        finally:
            self.at_work.remove(landing)


class Stage:
    """A runner, its store and files, and the stand-ins around it."""

    def __init__(self, root: Path, rules: RunnerRules | None = None) -> None:
        self.rules = rules or RULES
        self.feed = JobFeed()
        self.store = MemoryJobStore(tell=self.feed.tell)
        self.artifacts = Artifacts(root)
        self.handover = HeldHandover()
        self.engine = HeldEngine()
        self.now = 1000.0
        self.exported: list[tuple[str, Sequence[Span]]] = []
        self._ids = itertools.count()
        self.runner = self.fresh_runner()

    def fresh_runner(self) -> JobRunner:
        """Another runner over the same store and files, as after a restart."""
        self.registry = CollectorRegistry()
        return JobRunner(
            self.store,
            self.artifacts,
            self.handover,  # type: ignore[arg-type]
            self.engine,  # type: ignore[arg-type]
            self.rules,
            self.feed,
            JobAccounts(self.registry),
            lambda trace, spans: self.exported.append((trace, spans)),
            clock=lambda: self.now,
        )

    def open(self) -> None:
        """Let every phase go on."""
        self.handover.gate.set()
        self.engine.gate.set()

    async def add(
        self, *, priority: int = 0, key: str | None = None, outputs: int = 1, quality: Quality = "lossless"
    ) -> str:
        """One more job with one input file."""
        plan = VideoPlan(
            model="tiny",
            task=Task.T2VA,
            prompt="a ball",
            height=64,
            width=64,
            num_frames=107,
            num_inference_steps=3,
            flow_shift=12,
            audio_flow_shift=3,
            seed=1,
            num_outputs=outputs,
            quality=quality,
            return_stage_metrics=True,
        )
        job_id = f"video_{next(self._ids):032x}"
        upload = self.artifacts.open_upload()
        upload.file("0").write_bytes(b"input")
        self.artifacts.claim(upload, job_id)
        job = Job(id=job_id, sequence=0, plan=plan, created_at=self.now, priority=priority, key=key)
        await self.store.add(job, limit=1000)
        self.runner.wake()
        return job_id

    def store_away(self) -> Callable[[], None]:
        """Let the store not answer the runner any more; what is returned brings it back."""
        names = ("change", "claim", "renew", "reclaim", "expired")

        async def away(*_: object, **__: object) -> Any:
            raise StoreUnavailable("the database is away")

        for name in names:
            setattr(self.store, name, away)

        def back() -> None:
            for name in names:
                delattr(self.store, name)

        return back

    async def job(self, job_id: str) -> Job:
        """The job as it is kept."""
        job = await self.store.get(job_id)
        assert job is not None
        return job

    async def until(self, condition: Callable[[], Any]) -> None:
        """Until `condition()`, or what it awaits, is true."""
        async with asyncio.timeout(LATEST_S):
            while True:
                met = condition()
                if asyncio.iscoroutine(met):
                    met = await met
                if met:
                    return
                await asyncio.sleep(0.001)

    async def final(self, job_id: str) -> Job:
        """The job once it is final and nothing works on it."""
        job = await self.runner.wait(job_id, LATEST_S)
        assert job is not None
        assert job.finished
        # Waiters are woken by the store; what is left of the inputs goes a moment later.
        await self.until(lambda: self.runner._line.find(job_id) is None)
        return job

    def files(self) -> list[Path]:
        """Everything but clips and the lock."""
        return [p for p in self.artifacts._root.rglob("*") if p.is_file() and p.parent.name not in ("clips", "state")]


def play(root: Path, scenario: Scenario, rules: RunnerRules | None = None, *, running: bool = True) -> Stage:
    """A scenario beside a running runner; nothing is held and no stray file is left afterwards."""
    state = root / "state"
    state.mkdir()

    async def main() -> Stage:
        stage = Stage(state, rules)
        work = asyncio.create_task(stage.runner.run()) if running else None
        await scenario(stage)
        if work is not None:
            work.cancel()
            await asyncio.wait([work])
        assert stage.handover.held == set()
        assert stage.engine.at_work == []
        stage.artifacts.close()
        return stage

    return asyncio.run(main())
