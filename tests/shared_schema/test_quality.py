"""Which forwards of a clip are skipped: pure decisions of a profile."""

import math

import pytest
from pydantic import ValidationError

from shared_schema.quality import PROFILES, Skips, StepCache, joint_change

HIGH = PROFILES["high"]
assert HIGH is not None


def decided(profile: StepCache, changes: list[float]) -> str:
    """`c` for a computed forward and `s` for a skipped one, with the change that each would see."""
    skips, seen = Skips(), ""
    for change in changes:
        skipped = skips.possible(profile) and profile.allows(change)
        skips = skips.then(skipped=skipped)
        seen += "s" if skipped else "c"
    assert (skips.forwards, skips.skipped) == (len(seen), seen.count("s"))
    return seen


def test_lossless_has_no_profile_and_high_is_what_peers_call_conservative() -> None:
    assert PROFILES["lossless"] is None
    assert (HIGH.threshold, HIGH.warm_up_forwards, HIGH.most_in_a_row) == (0.04, 4, 1)


def test_the_first_forwards_are_computed_and_never_two_in_a_row_are_skipped() -> None:
    assert decided(HIGH, [0.0] * 9) == "ccccscscs"


def test_more_may_follow_each_other_where_a_profile_says_so() -> None:
    profile = StepCache(threshold=0.5, warm_up_forwards=1, most_in_a_row=2)
    assert decided(profile, [0.0] * 8) == "csscsscs"


@pytest.mark.parametrize("change", [0.04, 0.05, math.inf, math.nan])
def test_what_is_not_small_is_computed(change: float) -> None:
    assert decided(HIGH, [change] * 8) == "c" * 8
    assert decided(HIGH, [0.0] * 4 + [change, 0.0, 0.0]) == "cccccsc"


def test_four_forwards_of_a_turbo_adapter_are_all_computed() -> None:
    assert decided(HIGH, [0.0] * 4) == "cccc"


def test_a_threshold_of_zero_skips_nothing() -> None:
    assert decided(HIGH.model_copy(update={"threshold": 0.0}), [0.0] * 8) == "c" * 8


def test_the_stream_that_changes_most_decides() -> None:
    assert joint_change([(1.0, 100.0), (2.0, 4.0)]) == 0.5
    assert joint_change([(3.0, 4.0), (0.0, 1.0)]) == 0.75


@pytest.mark.parametrize("broken", [(1.0, 0.0), (0.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_a_stream_without_a_size_or_a_number_is_no_small_change(broken: tuple[float, float]) -> None:
    for streams in ([broken, (0.0, 1.0)], [(0.0, 1.0), broken]):
        assert not HIGH.allows(joint_change(streams))


def test_without_a_computed_forward_there_is_nothing_to_add() -> None:
    with pytest.raises(ValidationError):
        StepCache(threshold=1.0, warm_up_forwards=0, most_in_a_row=1)
