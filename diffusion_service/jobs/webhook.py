"""The state of a job's webhook, when it is tried again, and what it says. Pure: no clock, no dice, no IO.

waits (due_at None) --job ends--> pending --claim*--> pending --delivered--> delivered
                                                        `--refused: again later, or--> failed
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

DeliveryState = Literal["pending", "delivered", "failed"]

FIRST_DELAY_S = 5.0
GROWTH = 4.0
LONGEST_DELAY_S = 6 * 3600.0
GONE = 410
"""The receiver says that it wants no more."""


def delay_s(attempts: int, draw: float) -> float:
    """Seconds until the next try after `attempts` tries that failed; `draw` is uniform in 0 to 1.

    5 s, 20 s, 80 s, 5 min, 21 min, 85 min, 5.7 h, then 6 h, each between half and whole: receivers that were away
    together are not met by everyone at once.
    """
    whole = min(FIRST_DELAY_S * GROWTH ** (attempts - 1), LONGEST_DELAY_S)
    return whole * (0.5 + draw / 2)


class Webhook(BaseModel):
    """Where the end of a job is told, and how far that is. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    state: DeliveryState = "pending"
    attempts: int = 0
    due_at: float | None = None
    """When it is tried next; None while the job goes on, and once the delivery has ended."""
    last_status: int | None = None
    """HTTP status of the last answer; None: there was none."""
    last_error: str | None = None
    delivered_at: float | None = None

    def _changed(self, **changes: object) -> Self:
        return self.model_validate({**dict(self), **changes})

    def due(self, now: float) -> Self:
        """The job has ended: tell it."""
        return self._changed(due_at=now)

    def claimed(self, now: float, lease_s: float) -> Self:
        """Someone tries; if nothing is heard of him in `lease_s` seconds, another one does."""
        return self._changed(attempts=self.attempts + 1, due_at=now + lease_s)

    def answered(self, status: int | None, now: float) -> Self:
        """The receiver has it."""
        return self._changed(state="delivered", due_at=None, last_status=status, last_error=None, delivered_at=now)

    def refused(self, status: int | None, why: str, *, next_at: float, limit: int) -> Self:
        """It did not arrive; again at `next_at` unless `limit` tries were made or the receiver wants no more.

        One that somebody else delivered meanwhile stays delivered.
        """
        if self.state == "delivered":
            return self
        over = status == GONE or self.attempts >= limit
        return self._changed(
            state="failed" if over else "pending",
            due_at=None if over else next_at,
            last_status=status,
            last_error=why,
        )
