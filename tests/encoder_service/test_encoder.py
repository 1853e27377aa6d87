"""Admission of encodings: one at a time, leases on what waits, and nothing kept for a caller that went away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from encoder_service.accounts import EncodeAccounts
from encoder_service.commands import CountTokens, Drop, Encode, Encoded, Probe, Push, Pushed, Tidy
from encoder_service.encoder import Encoder
from shared_runtime.transport.accounts import TransportAccounts
from shared_schema.encode import EncodeProgress, EncodeRequest, InlineLanding, PushReceipt
from shared_schema.encoder_output import AUDIO, ROLES, TEXT, VISUAL, Manifest
from shared_schema.errors import LeaseExpired, NotFound, NotReady, RankDied, RankFailed
from shared_schema.layout import Layout
from shared_schema.tasks import Task

LEASE_S = 10.0
REQUEST = EncodeRequest(request_id="0" * 32, task=Task.T2VA, prompt="a ball", height=64, width=64, num_frames=107)
MANIFEST = Manifest.plan({TEXT: (3, 32), ROLES: (3,), VISUAL: (0,), AUDIO: (0,)}, Layout(Task.T2VA, 64, 64, 107))
RECEIPT = PushReceipt(bytes=1, checksum="0" * 16, seconds=0.1)


class HeldGroup:
    """A rank group that answers at once, but encodes only while its gate is open."""

    facts = None
    restarts = 0

    def __init__(self) -> None:
        self.ready = True
        self.gate = asyncio.Event()
        self.at_work = 0
        self.most_at_work = 0
        self.asked: list[object] = []
        self.tidy_errors: list[Exception] = []

    async def run(
        self, command: object, *, lane: str = "work", on_event: Callable[[object], None] | None = None
    ) -> Any:
        self.asked.append(command)
        match command:
            case Encode():
                self.at_work += 1
                self.most_at_work = max(self.most_at_work, self.at_work)
                assert on_event is not None
                on_event(EncodeProgress(stage="vae", done=1, of=3))
                try:
                    await self.gate.wait()
                finally:
                    self.at_work -= 1
                return Encoded(MANIFEST, (), {"text": 0.1})
            case Push() | Probe():
                return Pushed(RECEIPT)
            case CountTokens(prompt):
                return len(prompt)
            case Tidy() if self.tidy_errors:
                raise self.tidy_errors.pop()
            case Drop() if not self.ready:
                raise RankDied("gone")
        return None

    async def until_ready(self) -> None: ...

    def health(self) -> tuple[()]:
        return ()

    def of(self, kind: type) -> list[object]:
        return [command for command in self.asked if isinstance(command, kind)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def play(scenario: Callable[[Encoder, HeldGroup, Clock], Awaitable[None]]) -> None:
    async def main() -> None:
        group, clock = HeldGroup(), Clock()
        accounts, encodes = TransportAccounts(CollectorRegistry()), EncodeAccounts(CollectorRegistry())
        encoder = Encoder(group, endpoint="http://e", lease_s=LEASE_S, accounts=accounts, encodes=encodes, clock=clock)
        await scenario(encoder, group, clock)

    asyncio.run(main())


def test_an_encoding_waits_for_its_push_and_is_gone_after_it() -> None:
    async def scenario(encoder: Encoder, group: HeldGroup, clock: Clock) -> None:
        group.gate.set()
        encoding = await encoder.encode(REQUEST, ())
        assert (encoding.endpoint, encoding.expires_at) == ("http://e", clock.now + LEASE_S)
        assert encoder.waiting == 1
        assert (await encoder.push(encoding.id, InlineLanding())).receipt == RECEIPT
        assert encoder.waiting == 0
        with pytest.raises(LeaseExpired):
            await encoder.push(encoding.id, InlineLanding())

    play(scenario)


def test_requests_are_encoded_one_after_the_other() -> None:
    async def scenario(encoder: Encoder, group: HeldGroup, clock: Clock) -> None:
        del clock
        work = [asyncio.create_task(encoder.encode(REQUEST, ())) for _ in range(3)]
        await asyncio.sleep(0)
        group.gate.set()
        await asyncio.gather(*work)
        assert group.most_at_work == 1
        assert encoder.waiting == 3

    play(scenario)


def test_a_lapsed_encoding_is_neither_pushed_nor_renewed() -> None:
    # case 34
    async def scenario(encoder: Encoder, group: HeldGroup, clock: Clock) -> None:
        group.gate.set()
        encoding = await encoder.encode(REQUEST, ())
        clock.now += LEASE_S - 1
        assert encoder.renew(encoding.id) == clock.now + LEASE_S
        clock.now += LEASE_S + 0.1
        for asking in (lambda: encoder.push(encoding.id, InlineLanding()), lambda: _renew(encoder, encoding.id)):
            with pytest.raises(LeaseExpired):
                await asking()
        assert group.of(Push) == []

    play(scenario)


async def _renew(encoder: Encoder, encoding_id: str) -> None:
    encoder.renew(encoding_id)


def test_the_sweep_drops_what_has_lapsed_and_nothing_else() -> None:
    # case 46
    async def main() -> None:
        group, clock = HeldGroup(), Clock()
        accounts, encodes = TransportAccounts(CollectorRegistry()), EncodeAccounts(CollectorRegistry())
        encoder = Encoder(group, endpoint="http://e", lease_s=0.04, accounts=accounts, encodes=encodes, clock=clock)
        group.gate.set()
        old = await encoder.encode(REQUEST, ())
        clock.now += 1
        fresh = await encoder.encode(REQUEST, ())
        sweeping = asyncio.create_task(encoder.sweep())
        async with asyncio.timeout(60):
            while not group.of(Drop):
                await asyncio.sleep(0.005)
        sweeping.cancel()
        assert group.of(Drop) == [Drop(old.id)]
        assert encoder.renew(fresh.id) > clock.now

    asyncio.run(main())


def test_a_caller_that_goes_away_leaves_no_payload_in_the_leader() -> None:
    async def scenario(encoder: Encoder, group: HeldGroup, clock: Clock) -> None:
        del clock
        work = asyncio.create_task(encoder.encode(REQUEST, ()))
        while not group.at_work:
            await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        (encode,) = group.of(Encode)
        assert group.of(Drop) == [Drop(encode.encoding_id)]  # type: ignore[attr-defined]
        assert encoder.waiting == 0
        group.gate.set()
        await encoder.encode(REQUEST, ())

    play(scenario)


def test_without_ranks_nothing_is_begun_and_a_drop_is_no_error() -> None:
    async def scenario(encoder: Encoder, group: HeldGroup, clock: Clock) -> None:
        del clock
        group.ready = False
        with pytest.raises(NotReady):
            await encoder.encode(REQUEST, ())
        with pytest.raises(NotReady):
            await encoder.count_tokens("a ball")
        await encoder.drop("nothing")
        assert group.of(Encode) == []

    play(scenario)


def test_draining_lets_the_running_one_finish_and_begins_no_other() -> None:
    async def scenario(encoder: Encoder, group: HeldGroup, clock: Clock) -> None:
        del clock
        running = asyncio.create_task(encoder.encode(REQUEST, ()))
        while not group.at_work:
            await asyncio.sleep(0)
        assert encoder.health().status == "healthy"
        draining = asyncio.create_task(encoder.drain(60))
        await asyncio.sleep(0)
        assert (encoder.health().status, encoder.health().reason) == ("unhealthy", "the encoder is stopping")
        await asyncio.sleep(0)
        group.gate.set()
        await draining
        assert (await running).manifest == MANIFEST
        with pytest.raises(NotReady, match="stopping"):
            await encoder.encode(REQUEST, ())

    play(scenario)


def test_new_ranks_know_nothing_of_what_waited_in_the_old_ones() -> None:
    async def scenario(encoder: Encoder, group: HeldGroup, clock: Clock) -> None:
        del clock
        group.gate.set()
        encoding = await encoder.encode(REQUEST, ())
        encoder.forget_all()
        with pytest.raises(LeaseExpired):
            await encoder.push(encoding.id, InlineLanding())

    play(scenario)


def test_how_far_an_encoding_is_can_be_asked_while_it_is_under_way() -> None:
    # case 20
    async def scenario(encoder: Encoder, group: HeldGroup, _: Clock) -> None:
        for end in (group.gate.set, None):
            with pytest.raises(NotFound):
                encoder.progress(REQUEST.request_id)
            group.gate.clear()
            encoding = asyncio.create_task(encoder.encode(REQUEST, ()))
            while not group.at_work:
                await asyncio.sleep(0)
            assert encoder.progress(REQUEST.request_id) == EncodeProgress(stage="vae", done=1, of=3)
            if end is None:
                encoding.cancel()
            else:
                end()
            await asyncio.wait([encoding])
        with pytest.raises(NotFound):
            encoder.progress(REQUEST.request_id)

    play(scenario)


def test_the_sweep_goes_on_after_ranks_could_not_tidy() -> None:
    async def main() -> None:
        group = HeldGroup()
        group.tidy_errors = [RankFailed("NIXL is away", code="internal_error"), RankDied("gone")]
        accounts, encodes = TransportAccounts(CollectorRegistry()), EncodeAccounts(CollectorRegistry())
        encoder = Encoder(group, endpoint="http://e", lease_s=0.04, accounts=accounts, encodes=encodes)
        sweeping = asyncio.create_task(encoder.sweep())
        async with asyncio.timeout(60):
            while len(group.of(Tidy)) < 4:
                assert not sweeping.done()
                await asyncio.sleep(0.005)
        sweeping.cancel()

    asyncio.run(main())
