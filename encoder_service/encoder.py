"""Admission of encodings: one queue in front of the rank group, and a lease on everything that waits in it.

Runs in the encoder's API process. The payloads themselves stay in the leader; here is only who may still ask for them.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from encoder_service.accounts import EncodeAccounts
from encoder_service.commands import CountTokens, Drop, Encode, Encoded, Probe, Push, Pushed, Tidy
from shared_runtime.ranks.group import RankGroup
from shared_runtime.tracing import span
from shared_runtime.transport.accounts import TransportAccounts
from shared_schema.encode import EncodeProgress, EncodeRequest, Encoding, Landing
from shared_schema.errors import H3Error, LeaseExpired, NotFound, NotReady, RankDied
from shared_schema.health import Health

logger = logging.getLogger(__name__)


class Encoder:
    """The encode queue of one service."""

    def __init__(
        self,
        group: RankGroup,
        *,
        endpoint: str,
        lease_s: float,
        accounts: TransportAccounts,
        encodes: EncodeAccounts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._group = group
        self._endpoint = endpoint
        self._lease_s = lease_s
        self._accounts = accounts
        self._encodes = encodes
        self._queued = 0
        self._clock = clock
        self._turn = asyncio.Lock()
        self._waiting: dict[str, float] = {}
        """When each encoding lapses that nobody has pushed yet."""
        self._under_way: dict[str, EncodeProgress] = {}
        """How far encodings are, by request."""
        self.instance_id = uuid.uuid4().hex
        self._draining = False

    @property
    def waiting(self) -> int:
        """Encodings that are finished and not pushed."""
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """Requests that wait for the ranks."""
        return self._queued

    async def encode(self, request: EncodeRequest, files: tuple[Path, ...]) -> Encoding:
        """Encode one request; `files` must stay readable until this returns.

        Raises:
            InvalidRequest: a file cannot be decoded after all.
            NotReady: no rank group at present.
            RankDied, RankFailed: the ranks could not.
        """
        encoding_id = uuid.uuid4().hex
        async with self._turn_taken():
            if self.unready is not None:
                raise NotReady(self.unready)
            try:
                encoded = await self._group.run(
                    Encode(encoding_id, request, files), on_event=partial(self._hear, request.request_id)
                )
            except asyncio.CancelledError:
                # The leader may have been past its last step, and would keep what nobody will push.
                await self.drop(encoding_id)
                raise
            finally:
                self._under_way.pop(request.request_id, None)
        assert isinstance(encoded, Encoded)
        self._encodes.encoded(request.task, encoded.timings)
        logger.info("encoded %s in %.3f s", request.task, sum(encoded.timings.values()))
        return Encoding(
            id=encoding_id,
            endpoint=self._endpoint,
            manifest=encoded.manifest,
            references=encoded.references,
            timings=encoded.timings,
            expires_at=self._lease(encoding_id),
        )

    @contextlib.asynccontextmanager
    async def _turn_taken(self) -> AsyncIterator[None]:
        self._queued += 1
        try:
            with span("admission"):
                await self._turn.acquire()
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._turn.release()

    def _hear(self, request_id: str, event: object) -> None:
        assert isinstance(event, EncodeProgress)
        self._under_way[request_id] = event

    def progress(self, request_id: str) -> EncodeProgress:
        """How far the encoding of a request is.

        Raises:
            NotFound: it is not under way here, or nothing of it is finished yet.
        """
        found = self._under_way.get(request_id)
        if found is None:
            raise NotFound(f"nothing of request {request_id} is encoded here")
        return found

    async def push(self, encoding_id: str, landing: Landing) -> Pushed:
        """Have the leader write a waiting payload into its landing.

        Raises:
            LeaseExpired: it is not waiting here.
            TransportError, PayloadError: the landing is not what it says.
        """
        self._check_waiting(encoding_id)
        try:
            pushed = await self._side(Push(encoding_id, landing))
        except H3Error as error:
            self._accounts.failed(landing.kind, error.code)
            raise
        self._accounts.pushed(landing.kind, pushed.receipt.bytes, pushed.receipt.seconds)
        self._waiting.pop(encoding_id, None)
        return pushed

    async def probe(self, landing: Landing, nbytes: int) -> Pushed:
        """Have the leader write a known pattern, to prove the way."""
        return await self._side(Probe(landing, nbytes))

    async def _side(self, command: Push | Probe) -> Pushed:
        pushed = await self._group.run(command, lane="side")
        assert isinstance(pushed, Pushed)
        return pushed

    def renew(self, encoding_id: str) -> float:
        """Another lease for a waiting encoding; its new end in Unix time."""
        self._check_waiting(encoding_id)
        return self._lease(encoding_id)

    def _lease(self, encoding_id: str) -> float:
        self._waiting[encoding_id] = self._clock() + self._lease_s
        return self._waiting[encoding_id]

    def _check_waiting(self, encoding_id: str) -> None:
        if self._waiting.get(encoding_id, -math.inf) < self._clock():
            raise LeaseExpired(f"encoding {encoding_id} is not here: it was pushed, dropped, or lapsed")

    async def drop(self, encoding_id: str) -> None:
        """Forget an encoding; one that is not here is forgotten already."""
        self._waiting.pop(encoding_id, None)
        with contextlib.suppress(RankDied):
            await self._group.run(Drop(encoding_id), lane="side")

    async def count_tokens(self, prompt: str) -> int:
        """How many tokens the text encoder would read.

        Raises:
            NotReady: no rank group at present.
        """
        if not self._group.ready:
            raise NotReady("the encoder's ranks are not ready")
        count = await self._group.run(CountTokens(prompt), lane="side")
        assert isinstance(count, int)
        return count

    @property
    def unready(self) -> str | None:
        """Why no encoding can begin now; None if one can."""
        if self._draining:
            return "the encoder is stopping"
        return None if self._group.ready else "the encoder's ranks are not ready"

    def health(self) -> Health:
        """Healthy where an encoding can begin."""
        return Health(
            status="healthy" if self.unready is None else "unhealthy",
            reason=self.unready,
            ranks=self._group.health(),
            restarts=self._group.restarts,
        )

    async def drain(self, limit_s: float) -> None:
        """Take nothing new and let what is being encoded finish, for at most `limit_s` seconds."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self._turn:
                pass

    def forget_all(self) -> None:
        """The ranks are new: what waited in the old ones is gone."""
        self._waiting.clear()

    async def sweep(self) -> None:
        """Drop what has lapsed, every quarter of a lease, for ever."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            try:
                await self._drop_lapsed()
            except RankDied:
                continue
            except H3Error as error:
                logger.warning("what has lapsed was not all dropped: %s", error.message)

    async def _drop_lapsed(self) -> None:
        now = self._clock()
        for encoding_id in [name for name, end in self._waiting.items() if end < now]:
            logger.info("encoding %s lapsed", encoding_id)
            await self.drop(encoding_id)
        await self._group.run(Tidy(), lane="side")
