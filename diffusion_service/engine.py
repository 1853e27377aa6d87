"""The DiT group as a thing that makes clips: a plan and a landing in, finished files out. API process; no torch."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.catalog import Catalog
from diffusion_service.commands import DiffusionEvent, DiffusionFacts, Generate, Generated, MediaFiles, OutputTarget
from diffusion_service.jobs.job import ClipResult, PlannedLora, VideoPlan
from shared_runtime.ranks.group import RankGroup
from shared_schema.encode import ShmLanding
from shared_schema.encoder_output import Manifest
from shared_schema.errors import AdapterError, JobFailed, RankDied
from shared_schema.health import RankHealth
from shared_schema.quality import PROFILES
from shared_schema.videos import Execution

OnEvent = Callable[[DiffusionEvent], None]


class Engine:
    """One rank group that makes one job after the other, and finishes the file of the last one meanwhile."""

    def __init__(self, group: RankGroup, lora: PlannedLora | None = None, adapters: Catalog | None = None) -> None:
        self._group = group
        self._adapters = adapters
        self._lora = lora
        """The adapter that is merged into the ranks' weights."""

    @property
    def ready(self) -> bool:
        """Whether a clip would be begun at once."""
        return self._group.ready

    @property
    def restarts(self) -> int:
        """Starts of the group after the first."""
        return self._group.restarts

    def health(self) -> tuple[RankHealth, ...]:
        """Every rank as it looks now."""
        return self._group.health()

    async def until_ready(self) -> None:
        """Wait for the ranks."""
        await self._group.until_ready()

    async def generate(
        self,
        plan: VideoPlan,
        landing: ShmLanding,
        manifest: Manifest,
        media: MediaFiles | None,
        paths: tuple[Path, ...],
        on_event: OnEvent,
    ) -> ClipResult:
        """Make the clips of one job, one for each of `paths`. Cancelling the caller stops the ranks at their next step.

        `media` goes with a payload of text alone.

        Raises:
            JobFailed, RankDied, RankFailed, PayloadError: why there is no clip.
        """
        self._check_lora(plan)
        adapter = await asyncio.to_thread(self._bound, plan)
        facts = self._group.facts
        if not isinstance(facts, DiffusionFacts):
            raise RankDied("the rank group is not ready")

        def hear(event: object) -> None:
            assert isinstance(event, DiffusionEvent)
            on_event(event)

        command = _command(plan, landing, manifest, media, paths, adapter)
        generated = await self._group.run(command, on_event=hear)
        assert isinstance(generated, Generated)
        # The ranks that made the clips may be gone by now.
        return result_of(plan, generated, facts.execution)

    def _check_lora(self, plan: VideoPlan) -> None:
        """A job outlives its service, which may have been started again with another adapter."""
        if plan.lora == self._lora or (self._lora is None and plan.lora is not None and plan.lora.file is not None):
            return
        asked, has = (_named(lora) for lora in (plan.lora, self._lora))
        raise JobFailed(
            f"the job was accepted for {asked}, and the service now has {has}: send it again", code="invalid_input"
        )

    def _bound(self, plan: VideoPlan) -> Adapter | None:
        """The adapter that the job names, bound once more: its file may have changed since it was accepted."""
        lora = plan.lora
        if lora is None or lora.file is None:
            return None
        if self._adapters is None:
            raise JobFailed(
                "the job names an adapter, and the service has no lora_roots any more", code="invalid_input"
            )
        try:
            return self._adapters.bind(Path(lora.file), plan.task, name=lora.name, scale=lora.scale)
        except AdapterError as error:
            raise JobFailed(error.message, code="invalid_input", param="lora") from error


def _command(
    plan: VideoPlan,
    landing: ShmLanding,
    manifest: Manifest,
    media: MediaFiles | None,
    paths: tuple[Path, ...],
    adapter: Adapter | None,
) -> Generate:
    return Generate(
        landing=landing,
        manifest=manifest,
        task=plan.task,
        height=plan.height,
        width=plan.width,
        num_frames=plan.num_frames,
        num_inference_steps=plan.num_inference_steps,
        flow_shift=plan.flow_shift,
        audio_flow_shift=plan.audio_flow_shift,
        outputs=tuple(OutputTarget(plan.seed_of(index), path) for index, path in enumerate(paths)),
        media=media,
        adapter=adapter,
        step_cache=PROFILES[plan.quality],
    )


def result_of(plan: VideoPlan, generated: Generated, execution: Execution) -> ClipResult:
    """What the job keeps of it; `execution` is what the digests depend on."""
    return ClipResult(
        outputs=generated.outputs,
        stage_durations=generated.timings,
        execution=execution,
        warnings=generated.warnings,
        peak_memory_mb=generated.peak_memory_mb,
        metrics={
            "forwards": plan.forwards * plan.num_outputs,
            "skipped_forwards": sum(output.skipped_forwards for output in generated.outputs),
        },
    )


def _named(lora: PlannedLora | None) -> str:
    return "no adapter" if lora is None else f"the adapter {lora.name} at scale {lora.scale:g}"
