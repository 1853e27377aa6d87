"""Equal conditioning is encoded once, with the same clips as if it were encoded each time."""

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.clips import Clip, Medium, file_part
from tests.end_to_end.pair import Pair, Service, digest_of, make_pair

CLIP = Clip("kept", "ref2va", "<Picture 1> beside <Picture 2>, kept", (Medium("ref1.png"), Medium("img_odd.png")))
SEEDS = 10
ROOM_FOR_ONE = 12_000
"""Bytes; a payload of `CLIP` has 8,128."""


def metric(service: Service, name: str) -> float:
    """One value of `/metrics`."""
    lines = httpx.get(f"{service.url}/metrics", timeout=5).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def encodes(pair: Pair) -> float:
    """How many requests the encoder has finished."""
    return metric(pair.encoder, "h3_encode_seconds_count")


def made(pair: Pair, clip: Clip, cases: Path, seed: int = 1) -> dict[str, object]:
    """The completed job of a clip with that seed."""
    return pair.completed(pair.submit({**clip.fields(), "seed": str(seed)}, clip.parts(cases)))


def test_ten_seeds_of_one_request_cost_one_encode(pair: Pair, cases: Path) -> None:
    before, pushed = encodes(pair), metric(pair.encoder, "h3_transport_bytes_total")
    jobs = [pair.submit({**CLIP.fields(), "seed": str(seed)}, CLIP.parts(cases)) for seed in range(SEEDS)]
    videos = [pair.completed(job) for job in jobs]
    assert [video["conditioning_cache"] for video in videos] == ["miss"] + ["hit"] * (SEEDS - 1)
    assert encodes(pair) - before == 1
    payload = metric(pair.encoder, "h3_transport_bytes_total") - pushed
    assert metric(pair.diffusion, "h3_conditioning_cache_bytes") >= payload > 0
    for video in videos[1:]:
        assert video["references"] == videos[0]["references"]
        assert video["stage_durations"]["encode"] == 0.0  # type: ignore[index]
    assert len({str(video["frames_sha256"]) for video in videos}) == SEEDS
    for seed, video in enumerate(videos[1:3], start=1):
        fresh = {**CLIP.fields(), "seed": str(seed), "num_inference_steps": "4"}
        # Another name of a file is no other content, another length is: the payload is made anew.
        renamed = [(name, ("other.png", data, kind)) for name, (_, data, kind) in CLIP.parts(cases)]
        again = pair.completed(pair.submit(fresh, renamed))
        assert (again["conditioning_cache"], again["frames_sha256"]) == ("hit", video["frames_sha256"])


@pytest.mark.slow
def test_clips_of_kept_conditioning_equal_those_of_fresh_conditioning(
    tmp_path: Path, checkpoint: Path, cases: Path
) -> None:
    another = replace(CLIP, prompt=f"{CLIP.prompt}, another")
    small = make_pair(tmp_path, str(checkpoint), {"conditioning_cache_bytes": ROOM_FOR_ONE})
    with small.running():
        videos = [made(small, clip, cases) for clip in (CLIP, CLIP, another, CLIP)]
    assert [video["conditioning_cache"] for video in videos] == ["miss", "hit", "miss", "miss"]
    assert digest_of(videos[0]) == digest_of(videos[1]) == digest_of(videos[3])


@pytest.mark.parametrize("other", ["img_quad.png", "img_exif6.jpg"])
def test_the_same_words_with_another_picture_are_encoded_anew(pair: Pair, cases: Path, other: str) -> None:
    # case 39
    first = made(pair, CLIP, cases)
    fields = {**CLIP.fields(), "seed": "1"}
    changed = pair.completed(pair.submit(fields, [file_part(cases / other), CLIP.parts(cases)[1]]))
    assert changed["conditioning_cache"] == "miss"
    assert changed["frames_sha256"] != first["frames_sha256"]
    again = made(pair, CLIP, cases)
    assert (again["conditioning_cache"], again["frames_sha256"]) == ("hit", first["frames_sha256"])


def test_the_order_of_references_is_part_of_what_is_kept(pair: Pair, cases: Path) -> None:
    made(pair, CLIP, cases)
    turned = pair.completed(pair.submit({**CLIP.fields(), "seed": "1"}, CLIP.parts(cases)[::-1]))
    assert turned["conditioning_cache"] == "miss"


def test_all_outputs_of_a_job_cost_one_encode(pair: Pair, cases: Path) -> None:
    before = encodes(pair)
    fields = {**CLIP.fields(), "prompt": f"{CLIP.prompt}, thrice", "num_outputs_per_prompt": "3"}
    video = pair.completed(pair.submit(fields, CLIP.parts(cases)))
    assert (video["conditioning_cache"], len(video["outputs"])) == ("miss", 3)  # type: ignore[arg-type]
    assert encodes(pair) - before == 1
