"""How a job's payload comes into its landing: by which encoder, once for equal jobs, and what is left if it fails."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from diffusion_service.conditioning_cache import ConditioningCache
from diffusion_service.encoders import Encoders
from diffusion_service.handover import Handover, Landed, PayloadRules
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.job import Job
from shared_runtime.transport.accounts import TransportAccounts
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.encode import EncodeProgress, EncodeRequest, Encoding, PushReceipt, ShmLanding
from shared_schema.errors import ChecksumMismatch, EncoderAway, NotFound, NotReady, RankDied
from shared_schema.layout import Layout
from shared_schema.tasks import Task
from shared_schema.videos import Phase
from tests.diffusion_service.jobs.made import PLAN
from tests.payloads import TEXT_DIM, payload_of

LAYOUT = Layout(Task.T2VA, 64, 96, 107)


@dataclass
class Encoder:
    """An encoder's link and client in one: encodes by prompt, and raises what the test lays down, one a call."""

    sender: ShmSender
    reason: str | None = None
    starving: bool = False
    encode_errors: list[Exception] = field(default_factory=list)
    push_errors: list[Exception] = field(default_factory=list)
    encoded: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    said: list[EncodeProgress] = field(default_factory=list)
    """What it answers when it is asked how far it is, one after the other."""

    @property
    def client(self) -> "Encoder":
        return self

    def lost(self, reason: str) -> None:
        self.reason = reason

    async def encode(self, request: EncodeRequest, _files: tuple[Path, ...]) -> Encoding:
        self.encoded.append(request.prompt)
        if self.gate is not None:
            await self.gate.wait()
        if self.encode_errors:
            raise self.encode_errors.pop(0)
        manifest = self._payload(request.prompt).manifest
        return Encoding(
            id=request.prompt, endpoint="", manifest=manifest, references=(), timings={"text": 0.1}, expires_at=0
        )

    async def progress(self, request_id: str) -> EncodeProgress:
        if not self.said:
            raise NotFound(f"nothing of request {request_id} is encoded here")
        said = self.said.pop(0)
        if not self.said and self.gate is not None:
            self.gate.set()
        return said

    async def push(self, encoding: Encoding, landing: ShmLanding) -> PushReceipt:
        if self.push_errors:
            raise self.push_errors.pop(0)
        return self.sender.push(landing, self._payload(encoding.id))

    async def drop(self, encoding: Encoding) -> None:
        self.dropped.append(encoding.id)

    async def renew(self, encoding: Encoding) -> None:
        pass

    @staticmethod
    def _payload(prompt: str):  # type: ignore[no-untyped-def]
        return payload_of(LAYOUT, seed=len(prompt))


@dataclass
class Watching:
    """A job that notes what it is told."""

    turn: tuple[int, int] = (0, 0)
    phases: list[Phase] = field(default_factory=list)
    parts: list[EncodeProgress] = field(default_factory=list)
    starved: bool = False

    def reach(self, phase: Phase) -> None:
        self.phases.append(phase)

    def encoded(self, progress: EncodeProgress) -> None:
        self.parts.append(progress)

    def starve(self, starving: bool) -> None:
        self.starved = self.starved or starving


class Port:
    """A handover over a real slab with stand-ins for encoders."""

    def __init__(self, root: Path, pages: int, cache_bytes: int, count: int) -> None:
        (root / "slab").mkdir()
        (root / "state").mkdir()
        self.slab = Slab.create(root / "slab", pages * 4096, "test")
        self.sender = ShmSender(root / "slab")
        self.encoders = [Encoder(self.sender) for _ in range(count)]
        self.cache = ConditioningCache(self.slab, cache_bytes)
        self.artifacts = Artifacts(root / "state")
        self.handover = Handover(
            Encoders(self.encoders),  # type: ignore[arg-type]
            self.slab,
            self.sender,
            self.artifacts,
            5.0,
            PayloadRules(text_only=False, text_dim=TEXT_DIM, weights_revision="r1"),
            self.cache,
            TransportAccounts(CollectorRegistry()),
        )
        self._jobs = 0

    async def land(self, prompt: str, watching: Watching | None = None) -> Landed:
        """Another job with that prompt, landed."""
        self._jobs += 1
        plan = PLAN.model_copy(update={"prompt": prompt, "seed": self._jobs})
        job = Job(id=f"video_{self._jobs:032x}", sequence=self._jobs, plan=plan, created_at=0)
        return await self.handover.land(job, watching or Watching((0, self._jobs)))

    def bytes_of(self, landed: Landed) -> bytes:
        """The payload as the ranks would read it."""
        return bytes(self.slab.view(landed.kept.landing))


def play(
    root: Path, scenario: Callable[[Port], Awaitable[None]], *, pages: int = 64, cache: int = 2**20, count: int = 1
) -> None:
    """A scenario within its time; afterwards only what is kept is in the slab."""

    async def limited() -> None:
        port = Port(root, pages, cache, count)
        try:
            async with asyncio.timeout(60):
                await scenario(port)
            assert port.slab.stats.landings == port.cache.stats.entries
        finally:
            port.sender.close()
            port.slab.close()
            port.artifacts.close()

    asyncio.run(limited())


def test_equal_jobs_are_encoded_once_and_have_the_same_bytes(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        first = await port.land("a ball")
        second = await port.land("a ball")
        other = await port.land("another ball")
        assert [each.cache for each in (first, second, other)] == ["miss", "hit", "miss"]
        assert port.encoders[0].encoded == ["a ball", "another ball"]
        assert port.bytes_of(first) == port.bytes_of(second) != port.bytes_of(other)
        assert second.durations == {"encode": 0.0, "transfer": 0.0}
        for each in (first, second, other):
            each.use.release()

    play(tmp_path, scenario)


def test_equal_jobs_at_once_wait_for_the_first_one(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        landed = await asyncio.gather(*(port.land("a ball") for _ in range(5)))
        assert sorted(str(each.cache) for each in landed) == ["hit"] * 4 + ["miss"]
        for each in landed:
            each.use.release()

    play(tmp_path, scenario, count=2)


def test_a_first_one_that_fails_leaves_the_encoding_to_the_next(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        port.encoders[0].encode_errors.append(ZeroDivisionError("bug"))
        ends = await asyncio.gather(port.land("a ball"), port.land("a ball"), return_exceptions=True)
        assert isinstance(ends[0], ZeroDivisionError)
        assert isinstance(ends[1], Landed)
        assert ends[1].cache == "miss"
        ends[1].use.release()

    play(tmp_path, scenario)


def test_without_a_cache_every_job_is_encoded_and_its_landing_given_back(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        for _ in range(2):
            landed = await port.land("a ball")
            assert landed.cache is None
            landed.use.release()
        assert port.encoders[0].encoded == ["a ball"] * 2
        assert port.slab.stats.landings == 0

    play(tmp_path, scenario, cache=0)


@pytest.mark.parametrize("error", [NotReady("starting"), EncoderAway("refused")])
def test_an_encoder_that_has_not_begun_costs_nothing_and_the_next_is_asked(tmp_path: Path, error: Exception) -> None:
    async def scenario(port: Port) -> None:
        port.encoders[0].encode_errors.append(error)
        (await port.land("a ball")).use.release()
        assert [encoder.encoded for encoder in port.encoders] == [["a ball"], ["a ball"]]
        assert port.encoders[0].reason is not None

    play(tmp_path, scenario, count=2)


def test_the_only_encoder_is_waited_for(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        port.encoders[0].encode_errors += [EncoderAway("refused")] * 2
        landing = asyncio.create_task(port.land("a ball"))
        for _ in range(2):
            while port.encoders[0].reason is None:
                await asyncio.sleep(0.01)
            port.encoders[0].reason = None
        (await landing).use.release()
        assert len(port.encoders[0].encoded) == 3

    play(tmp_path, scenario)


def test_an_encoder_that_dies_over_a_job_is_told_from_one_that_is_away(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        port.encoders[0].encode_errors.append(RankDied("gone"))
        with pytest.raises(RankDied):
            await port.land("a ball")
        assert port.encoders[0].reason == "gone"
        port.encoders[0].reason = None
        port.encoders[0].push_errors.append(EncoderAway("refused"))
        with pytest.raises(RankDied, match="before it pushed"):
            await port.land("a ball")

    play(tmp_path, scenario)


def test_a_failed_push_is_dropped_there_and_given_back_here(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        port.encoders[0].push_errors.append(ChecksumMismatch("bits"))
        with pytest.raises(ChecksumMismatch):
            await port.land("a ball")
        assert port.encoders[0].dropped == ["a ball"]
        assert port.slab.stats.landings == 0
        (await port.land("a ball")).use.release()

    play(tmp_path, scenario)


def test_what_is_kept_makes_room_for_a_push(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        for n in range(6):
            watching = Watching()
            (await port.land("a ball" + n * "!", watching)).use.release()
            assert not watching.starved
        assert port.cache.stats.entries < 6

    play(tmp_path, scenario, pages=4)


def test_a_push_without_room_waits_until_a_landing_is_given_back(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        held = [await port.land(prompt) for prompt in ("a", "ab", "abc", "abcd")]
        watching = Watching()
        landing = asyncio.create_task(port.land("abcde", watching))
        await asyncio.sleep(0.3)
        assert watching.starved
        assert not landing.done()
        held.pop(0).use.release()
        for each in (*held, await landing):
            each.use.release()
        assert watching.phases == ["encoding", "transferring"]

    play(tmp_path, scenario, pages=4)


def test_a_job_that_is_stopped_while_it_is_encoded_leaves_the_encoder_free(tmp_path: Path) -> None:
    async def scenario(port: Port) -> None:
        port.encoders[0].gate = asyncio.Event()
        landing = asyncio.create_task(port.land("a ball"))
        while not port.encoders[0].encoded:
            await asyncio.sleep(0.01)
        landing.cancel()
        await asyncio.wait([landing])
        port.encoders[0].gate.set()
        landed = await port.land("a ball")
        assert landed.cache == "miss"
        landed.use.release()

    play(tmp_path, scenario)


def test_the_job_is_told_how_far_its_encoding_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # case 20
    monkeypatch.setattr("diffusion_service.handover.PROGRESS_S", 0.001)
    first, second = EncodeProgress(stage="vae", done=1, of=3), EncodeProgress(stage="vae", done=2, of=3)

    async def scenario(port: Port) -> None:
        (encoder,) = port.encoders
        encoder.gate, encoder.said = asyncio.Event(), [first, first, second]
        watching = Watching()
        (await port.land("a long one", watching)).use.release()
        assert watching.parts == [first, second]
        assert watching.phases == ["encoding", "transferring"]
        (await port.land("one that nothing is said of", watching)).use.release()
        assert watching.parts == [first, second]

    play(tmp_path, scenario)
