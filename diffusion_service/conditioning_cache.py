"""Conditioning that need not be encoded again: payloads that stay in their landings after use. API process; no torch.

A payload is known by everything that it was made from, so equal requests, for example ten seeds of one, are encoded
once. It stays where it was pushed: a hit copies nothing, and a push that needs the room takes it.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from shared_runtime.transport.base import Receiver
from shared_schema.encode import EncodeRequest, ShmLanding, UsedReference
from shared_schema.encoder_output import Manifest

Key = str


@dataclass(frozen=True)
class Kept:
    """A verified payload in its landing, and what its encoder reported."""

    landing: ShmLanding
    manifest: Manifest
    references: tuple[UsedReference, ...]


@dataclass(frozen=True)
class CacheStats:
    """What the cache holds now, and what it has seen."""

    entries: int
    bytes: int
    hits: int
    misses: int


def conditioning_key(request: EncodeRequest, media: tuple[str, ...], weights_revision: str, *, text_only: bool) -> Key:
    """What decides an encoder's output, hashed: prompt, media bytes, geometry, order, weights and split.

    `media` are the SHA-256 of the references' bytes in request order. The seed is no part: encoders draw nothing.
    """
    asked = request.model_copy(update={"request_id": "0" * 32}).model_dump_json()
    parts = (asked, *media, weights_revision, str(text_only))
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


class Use:
    """A payload that stays until `release`, which may be repeated."""

    def __init__(self, kept: Kept, give_back: Callable[[], None]) -> None:
        self.kept = kept
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """The ranks have it, or nobody wants it any more."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


@dataclass
class _Entry:
    kept: Kept
    users: int = 0


class ConditioningCache:
    """Payloads by key, the least recently used given up first; those in use are never given up.

    Args:
        receiver: whose landings these are.
        limit_bytes: of all payloads that nobody uses; 0 keeps none.
    """

    def __init__(self, receiver: Receiver[ShmLanding], limit_bytes: int) -> None:
        self._receiver = receiver
        self._limit = limit_bytes
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._locks: dict[Key, asyncio.Lock] = {}
        self._asking: Tally[Key] = Tally()
        self._hits = self._misses = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return self._limit > 0

    @property
    def stats(self) -> CacheStats:
        """For metrics and tests."""
        held = sum(entry.kept.landing.length for entry in self._entries.values())
        return CacheStats(len(self._entries), held, self._hits, self._misses)

    @contextlib.asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[None]:
        """One job at a time for each key: an equal one waits, and then finds what the first one made."""
        self._asking[key] += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                yield
        finally:
            self._asking[key] -= 1
            if not self._asking[key]:
                del self._asking[key], self._locks[key]

    def find(self, key: Key) -> Use | None:
        """The payload of that key, if it is here."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return self._use(entry)

    def keep(self, key: Key, kept: Kept) -> Use:
        """Remember a payload that was just verified; the caller uses it first."""
        entry = self._entries[key] = _Entry(kept)
        return self._use(entry)

    def pass_by(self, kept: Kept) -> Use:
        """Use a payload that is not to be remembered."""
        return Use(kept, lambda: self._receiver.release(kept.landing))

    def make_room(self) -> bool:
        """Give up the payload that was used longest ago; False if everything that is kept is in use."""
        for key, entry in self._entries.items():
            if not entry.users:
                del self._entries[key]
                self._receiver.release(entry.kept.landing)
                return True
        return False

    def _use(self, entry: _Entry) -> Use:
        entry.users += 1
        return Use(entry.kept, lambda: self._unuse(entry))

    def _unuse(self, entry: _Entry) -> None:
        entry.users -= 1
        while self._idle_bytes() > self._limit:
            self.make_room()

    def _idle_bytes(self) -> int:
        return sum(entry.kept.landing.length for entry in self._entries.values() if not entry.users)
