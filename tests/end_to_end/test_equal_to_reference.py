"""The promise: a served clip is, bit for bit, the clip that diffusers' one-process pipeline makes."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.clips import EQUAL_CLIPS, HARD_MEDIA, TEXT, Clip
from tests.end_to_end.pair import Pair
from tests.end_to_end.plain_media import read_clip

CLIPS = (*EQUAL_CLIPS, *HARD_MEDIA)


@pytest.fixture(scope="module")
def jobs(pair: Pair, cases: Path) -> dict[str, str]:
    """Job ids of all clips, queued together: the next is encoded while one is denoised."""
    return {clip.name: pair.submit(clip.fields(), clip.parts(cases)) for clip in CLIPS}


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.name)
def test_frames_and_sound_equal_the_reference_bit_for_bit(
    pair: Pair, jobs: dict[str, str], digests: dict[str, dict[str, str]], clip: Clip
) -> None:
    video = pair.completed(jobs[clip.name])
    assert {name: video[name] for name in ("frames_sha256", "audio_sha256")} == digests[clip.name]


def test_the_reference_makes_another_clip_for_every_request(digests: dict[str, dict[str, str]]) -> None:
    for name in ("frames_sha256", "audio_sha256"):
        assert len({clip[name] for clip in digests.values()}) == len(CLIPS)


@pytest.mark.parametrize("clip", EQUAL_CLIPS, ids=lambda clip: clip.name)
def test_the_file_holds_what_the_digests_say(pair: Pair, jobs: dict[str, str], reference: Path, clip: Clip) -> None:
    pair.completed(jobs[clip.name])
    served = read_clip(pair.client.get(f"/v1/videos/{jobs[clip.name]}/content").content)
    made = np.load(reference / f"{clip.name}.npz")
    assert served.fps == 24
    assert served.frames.shape == made["frames"].shape
    # x264 and 4:2:0 lose what is finer than two pixels; blocks of four by four come through.
    assert np.abs(_blocks(served.frames) - _blocks(made["frames"])).mean() < MAX_BLOCK_ERROR
    assert abs(served.sound.shape[1] - clip.num_frames / 24 * 32_000) <= 1024
    assert _correlation(served.sound, made["sound"]) > MIN_CORRELATION


def test_a_json_body_makes_the_same_clip_as_a_form(pair: Pair, digests: dict[str, dict[str, str]]) -> None:
    # case 13
    fields = {**TEXT.fields(), "extra_params": json.loads(TEXT.fields()["extra_params"])}
    answer = pair.client.post("/v1/videos", json=fields)
    assert answer.status_code == 200, answer.text
    assert pair.completed(answer.json()["id"])["frames_sha256"] == digests[TEXT.name]["frames_sha256"]


def test_the_same_request_makes_the_same_clip_again(pair: Pair, digests: dict[str, dict[str, str]]) -> None:
    job = pair.submit(TEXT.fields())
    assert pair.completed(job)["audio_sha256"] == digests[TEXT.name]["audio_sha256"]


MAX_BLOCK_ERROR = 4.0
"""Of 255, the mean over 4x4 blocks."""
MIN_CORRELATION = 0.9


def _blocks(frames: np.ndarray) -> np.ndarray:
    count, height, width, _ = frames.shape
    means: np.ndarray = frames.reshape(count, height // 4, 4, width // 4, 4, 3).mean(axis=(2, 4))
    return means


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    length = min(one.shape[1], other.shape[1])
    return float(np.corrcoef(one[:, :length].ravel(), other[:, :length].ravel())[0, 1])
