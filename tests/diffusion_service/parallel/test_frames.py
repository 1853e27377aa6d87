"""A clip's frames are the same under every parallel plan, but for a level here and there."""

import numpy as np
import pytest

from shared_schema.tasks import Task
from tests.diffusion_service.rank_jobs import FRAMES, SIDE, Outcome, Shop, plan

STEPS = 9


@pytest.fixture(scope="module")
def alone(shop: Shop) -> Outcome:
    return shop.make({}, steps=STEPS)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(plan(tp=2), id="tp"),
        pytest.param(plan(ulysses=2), id="ulysses"),
        pytest.param(plan(tp=2, ulysses=2), id="both", marks=pytest.mark.slow),
    ],
)
def test_frames_differ_by_one_level_in_one_value_of_a_thousand_at_most(
    shop: Shop, alone: Outcome, stage: dict[str, object]
) -> None:
    made = shop.make(stage, steps=STEPS)
    for task in Task:
        one, other = (np.concatenate(each.clips[task].frames).astype(np.int16) for each in (alone, made))
        assert one.shape == other.shape == (FRAMES, SIDE, SIDE, 3)
        assert one.std() > 1, "a picture without anything in it proves nothing"
        apart = np.abs(one - other)
        assert apart.max() <= 1
        assert np.count_nonzero(apart) * 1000 <= apart.size
