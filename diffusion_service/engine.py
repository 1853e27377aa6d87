"""The DiT group as a thing that makes clips: a plan and a landing in, finished files out. API process; no torch."""

from collections.abc import Callable
from pathlib import Path

from diffusion_service.commands import DiffusionEvent, DiffusionFacts, Generate, Generated, MediaFiles, OutputTarget
from diffusion_service.jobs.job import VideoPlan
from shared_runtime.ranks.group import RankGroup
from shared_schema.encode import ShmLanding
from shared_schema.encoder_output import Manifest
from shared_schema.health import RankHealth
from shared_schema.videos import Execution

OnEvent = Callable[[DiffusionEvent], None]


class Engine:
    """One rank group that works on one job at a time."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

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

    @property
    def execution(self) -> Execution:
        """What the digests of clips made now depend on."""
        facts = self._group.facts
        assert isinstance(facts, DiffusionFacts)
        return facts.execution

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
    ) -> Generated:
        """Make the clips of one job, one for each of `paths`. Cancelling the caller stops the ranks at their next step.

        `media` goes with a payload of text alone.

        Raises:
            JobFailed, RankDied, RankFailed, PayloadError: why there is no clip.
        """
        command = Generate(
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
        )
        generated = await self._group.run(command, on_event=on_event)  # type: ignore[arg-type]
        assert isinstance(generated, Generated)
        return generated
