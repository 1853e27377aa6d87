"""When an encoder is trusted with jobs: it fits, its ranks are ready, and it is on GPUs of its own."""

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_service.encoder_client import EncoderClient
from diffusion_service.encoder_link import EncoderLink, Expected
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.encode import SCHEMA_VERSION, EncoderIdentity, Landing, PushReceipt, ShmLanding
from shared_schema.errors import ReceiverBusy, SlabFull
from shared_schema.health import Health

OURS = ("GPU-a", "GPU-b")
EXPECTED = Expected("r1", text_only=False, connector="SharedMemoryConnector", probe_bytes=4096, gpus=OURS)
IDENTITY = EncoderIdentity(
    schema_version=SCHEMA_VERSION,
    instance_id="1",
    model="tiny",
    weights_revision="r1",
    text_only=False,
    connector="SharedMemoryConnector",
    gpus=("GPU-c",),
)


class SaysSo(EncoderClient):
    """An encoder that is what the test says, and pushes what it is asked for."""

    def __init__(self, identity: EncoderIdentity, folder: Path) -> None:
        super().__init__("http://encoder", token=None, encode_timeout_s=1)
        self._identity = identity
        self._sender = ShmSender(folder)
        self.probes = 0

    async def identity(self) -> EncoderIdentity:
        return self._identity

    async def health(self) -> Health:
        return Health(status="healthy")

    async def probe(self, landing: Landing, nbytes: int) -> PushReceipt:
        assert isinstance(landing, ShmLanding)
        self.probes += 1
        return self._sender.push_bytes(landing, memoryview(bytes(nbytes)))


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    slab = Slab.create(tmp_path, 2**20, "test")
    try:
        yield slab
    finally:
        slab.close()


def reason(slab: Slab, tmp_path: Path, expected: Expected = EXPECTED, **theirs: object) -> str | None:
    """Why an encoder with this identity is not trusted; the probe is made exactly when it is."""

    async def look() -> str | None:
        client = SaysSo(IDENTITY.model_copy(update=theirs), tmp_path)
        link = EncoderLink(client, slab, expected, lease_s=5)
        watching = asyncio.create_task(link.watch())
        before = link.reason
        while link.reason == before:
            await asyncio.sleep(0.01)
        watching.cancel()
        await client.close()
        assert client.probes == (link.reason is None)
        return link.reason

    return asyncio.run(look())


def test_an_encoder_that_fits_is_trusted_after_one_probe(slab: Slab, tmp_path: Path) -> None:
    assert reason(slab, tmp_path) is None


@pytest.mark.parametrize(
    ("name", "theirs", "says"),
    [
        ("weights_revision", "r2", "differ in weights_revision: r2 there, r1 here"),
        ("text_only", True, "differ in text_only: True there, False here"),
        ("connector", "NixlConnector", "differ in connector: NixlConnector there, SharedMemoryConnector here"),
        ("vae_encode_precision", "split", "differ in vae_encode_precision: split there, fp32 here"),
        ("schema_version", 99, "speaks schema version 99"),
    ],
)
def test_an_encoder_of_another_kind_is_refused_by_what_differs(
    slab: Slab, tmp_path: Path, name: str, theirs: object, says: str
) -> None:
    assert says in str(reason(slab, tmp_path, **{name: theirs}))


def test_an_encoder_on_our_gpus_is_refused_by_their_names(slab: Slab, tmp_path: Path) -> None:
    told = str(reason(slab, tmp_path, gpus=("GPU-b", "GPU-c")))
    assert "both use GPU-b:" in told
    assert "share_devices: true in both stages" in told


@pytest.mark.parametrize(("theirs", "ours"), [(True, False), (False, True), (True, True)])
def test_gpus_are_shared_only_if_both_stages_say_so(slab: Slab, tmp_path: Path, theirs: bool, ours: bool) -> None:
    expected = Expected("r1", False, "SharedMemoryConnector", 4096, gpus=OURS, share_devices=ours)
    told = reason(slab, tmp_path, expected, gpus=OURS, share_devices=theirs)
    assert (told is None) == (theirs and ours)


def test_the_probe_takes_the_room_of_what_is_only_kept(slab: Slab, tmp_path: Path) -> None:
    """An encoder that comes back would never be trusted again beside a slab full of kept payloads."""
    kept = [slab.reserve(2**18, "a" * 32, 60, 0) for _ in range(3)]

    def make_room() -> bool:
        if kept:
            slab.release(kept.pop())
        return bool(kept)

    async def look() -> None:
        client = SaysSo(IDENTITY, tmp_path)
        link = EncoderLink(client, slab, dataclasses.replace(EXPECTED, probe_bytes=2**19), 5, make_room)
        watching = asyncio.create_task(link.watch())
        async with asyncio.timeout(60):
            while link.reason is not None:
                await asyncio.sleep(0.01)
        watching.cancel()
        await client.close()

    asyncio.run(look())


def test_a_probe_that_waits_for_room_says_so_until_there_is_some(slab: Slab, tmp_path: Path) -> None:
    """Else a job that needs the encoder, and one behind it that holds the room, would wait for each other for ever."""
    held = slab.reserve(2**18, "a" * 32, 60, 0)

    async def look() -> None:
        client = SaysSo(IDENTITY, tmp_path)
        link = EncoderLink(client, slab, dataclasses.replace(EXPECTED, probe_bytes=slab.largest_landing), 5)
        watching = asyncio.create_task(link.watch())
        async with asyncio.timeout(60):
            while not link.starving:
                await asyncio.sleep(0.01)
            assert "the probe of the transport waits: the slab has no room" in str(link.reason)
            slab.release(held)
            while link.reason is not None:
                await asyncio.sleep(0.01)
        assert not link.starving
        watching.cancel()
        await client.close()

    asyncio.run(look())


@pytest.mark.parametrize(("full", "starving"), [(SlabFull("full"), True), (ReceiverBusy("in a moment"), False)])
def test_only_a_full_slab_asks_others_to_give_something_up(
    slab: Slab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: SlabFull, starving: bool
) -> None:
    def refuse(*_: object) -> ShmLanding:
        raise full

    async def look() -> None:
        client = SaysSo(IDENTITY, tmp_path)
        link = EncoderLink(client, slab, EXPECTED, lease_s=5)
        monkeypatch.setattr(slab, "reserve", refuse)
        watching = asyncio.create_task(link.watch())
        async with asyncio.timeout(60):
            while "waits" not in (link.reason or ""):
                await asyncio.sleep(0.01)
        assert link.starving == starving
        watching.cancel()
        await client.close()

    asyncio.run(look())
