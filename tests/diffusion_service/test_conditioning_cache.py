"""What counts as equal conditioning, and that landings are kept, given up and given back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_service.conditioning_cache import CacheStats, ConditioningCache, Kept, conditioning_key
from shared_runtime.transport.slab import Slab
from shared_schema.encode import EncodeRequest, ReferenceInput
from shared_schema.encoder_output import Manifest
from shared_schema.tasks import Task
from tests.payloads import TEXT_DIM

IMAGE = ReferenceInput(kind="image")
REQUEST = EncodeRequest(
    request_id="a" * 32,
    task=Task.FL2VA,
    prompt="a ball",
    height=64,
    width=96,
    num_frames=107,
    keyframes=(0, -1),
    references=(IMAGE, IMAGE),
)
MEDIA = ("1" * 64, "2" * 64)
MANIFEST = Manifest.plan({"hidden_states.output": (5, TEXT_DIM), "meta.token_role_ids": (5,)}, None)


def key(
    request: EncodeRequest = REQUEST, media: tuple[str, ...] = MEDIA, weights: str = "r1", split: bool = False
) -> str:
    return conditioning_key(request, media, weights, text_only=split)


def test_the_same_request_under_another_id_is_equal() -> None:
    assert key() == key(REQUEST.model_copy(update={"request_id": "b" * 32}))


def test_whatever_an_encoder_sees_makes_another_key() -> None:
    # case 39
    changes: list[dict[str, object]] = [
        {"prompt": "a ball "},
        {"task": Task.REF2VA},
        {"height": 96},
        {"width": 64},
        {"num_frames": 124},
        {"keyframes": (0,)},
        {"references": (IMAGE, ReferenceInput(kind="video"))},
        {"references": (IMAGE, ReferenceInput(kind="image", use_audio=False))},
        {"references": (IMAGE, ReferenceInput(kind="image", start_seconds=1.0))},
    ]
    keys = [key(), *(key(REQUEST.model_copy(update=change)) for change in changes)]
    keys += [key(media=(MEDIA[1], MEDIA[0])), key(media=(MEDIA[0], "3" * 64)), key(weights="r2"), key(split=True)]
    assert len(set(keys)) == len(keys)


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    slab = Slab.create(tmp_path, 16 * 4096, "test")
    try:
        yield slab
    finally:
        slab.close()


def landed(slab: Slab, length: int = 1000) -> Kept:
    landing = slab.reserve(length, "a" * 32, lease_s=60, now=0)
    return Kept(landing, MANIFEST, ())


def test_a_payload_is_found_again_and_stays_in_its_landing(slab: Slab) -> None:
    cache = ConditioningCache(slab, 10_000)
    assert cache.find("k") is None
    kept = landed(slab)
    first = cache.keep("k", kept)
    first.release()
    found = cache.find("k")
    assert found is not None
    assert found.kept is kept
    slab.view(kept.landing)
    assert cache.stats == CacheStats(entries=1, bytes=1000, hits=1, misses=1)


def test_the_least_recently_used_goes_first_and_its_landing_is_given_back(slab: Slab) -> None:
    cache = ConditioningCache(slab, 2500)
    for name in "ab":
        cache.keep(name, landed(slab)).release()
    used = cache.find("a")
    assert used is not None
    used.release()
    cache.keep("c", landed(slab)).release()
    assert [cache.find(name) is not None for name in "abc"] == [True, False, True]
    assert slab.stats.landings == 2


def test_a_payload_in_use_is_never_given_up(slab: Slab) -> None:
    cache = ConditioningCache(slab, 1)
    use = cache.keep("k", landed(slab))
    again = cache.find("k")
    assert again is not None
    use.release()
    use.release()
    assert not cache.make_room()
    slab.view(again.kept.landing)
    again.release()
    assert (cache.stats.entries, slab.stats.landings) == (0, 0), "larger than the limit, so gone after use"


def test_room_is_made_one_payload_at_a_time(slab: Slab) -> None:
    cache = ConditioningCache(slab, 10_000)
    for name in "ab":
        cache.keep(name, landed(slab)).release()
    assert [cache.make_room() for _ in range(3)] == [True, True, False]
    assert slab.stats.landings == 0


def test_what_is_passed_by_is_given_back_at_once(slab: Slab) -> None:
    cache = ConditioningCache(slab, 10_000)
    use = cache.pass_by(landed(slab))
    use.release()
    use.release()
    assert (cache.stats.entries, slab.stats.landings) == (0, 0)


def test_equal_jobs_take_turns_and_others_do_not_wait(slab: Slab) -> None:
    async def play() -> None:
        cache = ConditioningCache(slab, 10_000)
        inside: list[str] = []
        gate = asyncio.Event()

        async def job(name: str, its: str) -> None:
            async with cache.turn(its):
                inside.append(name)
                await gate.wait()

        jobs = [asyncio.create_task(job(name, its)) for name, its in (("a1", "a"), ("a2", "a"), ("b1", "b"))]
        await asyncio.sleep(0.01)
        assert inside == ["a1", "b1"]
        jobs[0].cancel()
        await asyncio.sleep(0.01)
        assert inside == ["a1", "b1", "a2"]
        gate.set()
        await asyncio.wait(jobs)
        assert cache._locks == {}

    asyncio.run(play())
