"""The token bucket: what it lets through over time, and that it costs no memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion_service.api.rates import MOST_CALLERS, Bucket, Rate, RateLimiter, take
from shared_schema.errors import RateLimited

RATE = Rate(per_minute=60, burst=3)


def test_a_burst_passes_and_then_one_a_second() -> None:
    bucket, waits = None, []
    for now in (0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 100.0, 100.0, 100.0, 100.0):
        bucket, wait_s = take(bucket, RATE, now)
        waits.append(wait_s)
    assert waits == [0, 0, 0, 1.0, 0.5, 0, 1.0, 0, 0, 0, 1.0]


@given(st.lists(st.floats(0, 5), max_size=200), st.floats(0.1, 1000), st.integers(1, 20))
def test_never_more_than_burst_and_rate(pauses: list[float], per_minute: float, burst: int) -> None:
    rate, bucket, now, passed = Rate(per_minute, burst), None, 0.0, 0
    for pause in pauses:
        now += pause
        bucket, wait_s = take(bucket, rate, now)
        passed += wait_s == 0
        assert 0 <= bucket.tokens <= burst
        assert passed <= burst + now * per_minute / 60 + 1e-6


@given(st.floats(0, 0.99), st.floats(0.1, 1000))
def test_whoever_waits_as_long_as_told_passes(tokens: float, per_minute: float) -> None:
    rate = Rate(per_minute, 5)
    bucket, wait_s = take(Bucket(tokens, 0.0), rate, 0.0)
    assert take(bucket, rate, wait_s * 1.0001)[1] == 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    assert take(Bucket(0.0, 100.0), RATE, 0.0)[1] == 1.0


def test_callers_do_not_pay_for_each_other() -> None:
    limiter = RateLimiter(Rate(60, 1), lambda: 0.0)
    for caller in ("a", "b"):
        limiter.take(caller)
        with pytest.raises(RateLimited) as caught:
            limiter.take(caller)
        assert caught.value.retry_after_s == 1.0


def test_a_flood_of_names_costs_bounded_memory() -> None:
    limiter = RateLimiter(Rate(60, 2), lambda: 0.0)
    for number in range(MOST_CALLERS * 3):
        limiter.take(str(number))
    assert len(limiter._buckets) <= MOST_CALLERS
