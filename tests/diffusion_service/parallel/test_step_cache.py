"""Forwards are skipped alike under every plan: the same ones, with clips as near to each other as lossless ones."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from shared_schema.quality import StepCache
from shared_schema.tasks import Task
from tests.diffusion_service.rank_jobs import Made, Outcome, Shop, plan

STEPS = 31
SOME = StepCache(threshold=0.12, warm_up_forwards=4, most_in_a_row=1)
"""Of the tiny model's forwards it skips some and computes some after the warm-up."""
TASKS = frozenset({Task.T2VA, Task.REF2VA})
"""Without conditions, and with those of both streams."""


@pytest.fixture(scope="module")
def alone(shop: Shop) -> tuple[Outcome, Outcome]:
    """What one rank makes: without loss, and with skipped forwards."""
    return shop.make({}, steps=STEPS, only=TASKS), shop.make({}, steps=STEPS, step_cache=SOME, only=TASKS)


def apart(one: Made, other: Made) -> float:
    """The larger relative difference of picture and sound."""
    pairs = ((one.video, other.video), (one.audio, other.audio))
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def test_some_forwards_are_skipped_and_the_clip_stays_near(alone: tuple[Outcome, Outcome]) -> None:
    lossless, high = alone
    for task in TASKS:
        exact, made = lossless.clips[task], high.clips[task]
        assert not any(exact.skipped)
        assert exact.generated.outputs[0].skipped_forwards == 0
        assert 3 < sum(made.skipped) == made.generated.outputs[0].skipped_forwards
        assert len(made.skipped) == STEPS - 1
        assert not any(made.skipped[:4])
        assert made.skipped[4:].count(False) > sum(made.skipped)  # by the threshold too, not by the row alone
        assert made.digests != exact.digests
        for name in ("video", "audio"):
            one, other = getattr(made, name).flatten(), getattr(exact, name).flatten()
            assert float(cosine_similarity(one, other, dim=0)) > 0.999


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(plan(ulysses=2), id="ulysses"),
        pytest.param(plan(tp=2), id="tp"),
        pytest.param(
            {**plan(ulysses=2), "enable_distributed_layerwise_offload": True}, marks=pytest.mark.slow, id="gathered"
        ),
        pytest.param(plan(tp=2, ulysses=2), marks=pytest.mark.slow, id="both"),
        pytest.param({**plan(), "enable_cpu_offload": True}, marks=pytest.mark.slow, id="module"),
        pytest.param({**plan(), "enable_layerwise_offload": True}, marks=pytest.mark.slow, id="layerwise"),
    ],
)
def test_every_plan_skips_the_same_forwards(
    shop: Shop, alone: tuple[Outcome, Outcome], stage: dict[str, object]
) -> None:
    spread = shop.make(stage, steps=STEPS, step_cache=SOME, only=TASKS)
    for task in TASKS:
        made, wanted = spread.clips[task], alone[1].clips[task]
        assert made.skipped == wanted.skipped
        assert apart(made, wanted) < 1e-4 < apart(made, alone[0].clips[task])


def test_fp8_skips_too(shop: Shop) -> None:
    fp8 = {"quantization_config": {"transformer": {"method": "fp8"}}}
    made = shop.make(fp8, steps=STEPS, step_cache=SOME, only=TASKS)
    for task in TASKS:
        assert sum(made.clips[task].skipped) > 3
        assert torch.isfinite(made.clips[task].video).all()
