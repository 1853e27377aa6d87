"""The engine: a job is made with the adapter that it was accepted for, or not at all, and says what made it."""

import asyncio
from typing import Any

import pytest

from diffusion_service.commands import DiffusionFacts, Generated
from diffusion_service.engine import Engine
from diffusion_service.jobs.job import PlannedLora
from shared_schema.errors import JobFailed, RankDied
from tests.diffusion_service.jobs.made import PLAN
from tests.diffusion_service.jobs.stage import EXECUTION

TURBO = PlannedLora(name="turbo", scale=1.0, modules=7)


class NoGroup:
    """Fails the test if a command reaches it."""

    async def run(self, command: object, **_: object) -> object:
        raise AssertionError("the ranks were asked")


class DyingGroup:
    """Does one command, and is gone."""

    facts: DiffusionFacts | None = DiffusionFacts("cpu", 0, "dummy", execution=EXECUTION)

    async def run(self, command: object, **_: object) -> object:
        self.facts = None
        return Generated((), {}, (), None)


def test_ranks_that_die_once_a_clip_is_made_leave_what_it_was_made_with() -> None:
    group: Any = DyingGroup()
    engine = Engine(group)
    unused: Any = None
    for ready in (True, False):
        making = engine.generate(PLAN, unused, unused, None, (), unused)
        if ready:
            assert asyncio.run(making).execution == EXECUTION
        else:
            with pytest.raises(RankDied):
                asyncio.run(making)


@pytest.mark.parametrize(
    ("asked", "has", "says"),
    [
        (TURBO, None, "accepted for the adapter turbo at scale 1, and the service now has no adapter"),
        (TURBO.model_copy(update={"file": "/a"}), TURBO, "the service now has the adapter turbo"),
        (TURBO.model_copy(update={"file": "/a"}), None, "the service has no lora_roots any more"),
        (None, TURBO, "accepted for no adapter, and the service now has the adapter turbo"),
        (TURBO, TURBO.model_copy(update={"scale": 0.5}), "now has the adapter turbo at scale 0.5"),
    ],
)
def test_a_job_of_another_adapter_fails(asked: PlannedLora | None, has: PlannedLora | None, says: str) -> None:
    group: Any = NoGroup()
    plan = PLAN.model_copy(update={"lora": asked})
    unused: Any = None
    with pytest.raises(JobFailed, match=says) as caught:
        asyncio.run(Engine(group, has).generate(plan, unused, unused, None, (), unused))
    assert caught.value.code == "invalid_input"
