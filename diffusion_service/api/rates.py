"""How many requests a caller may send: a token bucket for each. The rule is pure; runs in the API process."""

from collections.abc import Callable
from dataclasses import dataclass

from shared_schema.errors import RateLimited

MOST_CALLERS = 10_000
"""Buckets that are kept; past it those that are full again go."""


@dataclass(frozen=True)
class Rate:
    """What a caller may send."""

    per_minute: float
    burst: int
    """At once, after a pause."""


@dataclass(frozen=True)
class Bucket:
    """What is left to one caller."""

    tokens: float
    at: float
    """Seconds on the caller's clock."""


def take(bucket: Bucket | None, rate: Rate, now: float) -> tuple[Bucket, float]:
    """The bucket after one request, and the seconds to wait: 0.0 where the request may pass.

    A request that may not pass takes nothing.
    """
    tokens = float(rate.burst) if bucket is None else refilled(bucket, rate, now)
    if tokens >= 1.0:
        return Bucket(tokens - 1.0, now), 0.0
    return Bucket(tokens, now), (1.0 - tokens) * 60.0 / rate.per_minute


def refilled(bucket: Bucket, rate: Rate, now: float) -> float:
    """Its tokens at `now`."""
    return min(float(rate.burst), bucket.tokens + max(now - bucket.at, 0.0) * rate.per_minute / 60.0)


class RateLimiter:
    """One bucket for each caller."""

    def __init__(self, rate: Rate, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def take(self, caller: str) -> None:
        """Count one request.

        Raises:
            RateLimited: it comes too early; it was not counted.
        """
        now = self._clock()
        if caller not in self._buckets and len(self._buckets) >= MOST_CALLERS:
            self._forget(now)
        self._buckets[caller], wait_s = take(self._buckets.get(caller), self._rate, now)
        if wait_s:
            raise RateLimited(f"at most {self._rate.per_minute:g} requests a minute", retry_after_s=wait_s)

    def _forget(self, now: float) -> None:
        full = float(self._rate.burst)
        kept = {name: bucket for name, bucket in self._buckets.items() if refilled(bucket, self._rate, now) < full}
        # Whoever floods with new names pays with everyone's memory of him, never with ours.
        self._buckets = kept if len(kept) < MOST_CALLERS else {}
