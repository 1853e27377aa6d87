"""When a POST is a repeat of an earlier one, and what it then answers. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared_schema.errors import Conflict

KEY_S = 24 * 3600.0
"""How long an `Idempotency-Key` is remembered."""
RETRY_S = 600.0
"""How long a request that a client library repeats by itself finds its job."""


@dataclass(frozen=True)
class Idempotency:
    """What makes a request known again, among those of one caller."""

    idempotency_key: str | None
    """The header, or None."""
    digest: str
    """SHA-256 of fields and media, hex."""
    retry: bool
    """The client library says that it sends this again."""


@dataclass(frozen=True)
class Accepted:
    """An earlier request of the same caller that became a job."""

    job_id: str
    idempotency_key: str | None
    digest: str | None
    """None: accepted by a program that kept none."""
    accepted_at: float


def earlier(asked: Idempotency, accepted: Iterable[Accepted], now: float) -> str | None:
    """The id of the job that answers this request, or None when it is a new one.

    Args:
        asked: the request.
        accepted: earlier requests of the same caller, newest first.
        now: Unix seconds.

    Raises:
        Conflict: its key came with another body.
    """
    if asked.idempotency_key is None:
        return _repeated(asked, accepted, now)
    for each in accepted:
        if each.idempotency_key == asked.idempotency_key and each.accepted_at > now - KEY_S:
            if each.digest != asked.digest:
                raise Conflict("this Idempotency-Key came with another request before", param="Idempotency-Key")
            return each.job_id
    return None


def _repeated(asked: Idempotency, accepted: Iterable[Accepted], now: float) -> str | None:
    if not asked.retry:
        return None
    same = (each for each in accepted if each.digest == asked.digest and each.accepted_at > now - RETRY_S)
    return next((each.job_id for each in same), None)
