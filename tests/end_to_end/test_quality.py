"""`quality: high` on a live pair: forwards are skipped and told, and lossless jobs around it keep their bits."""

import httpx
import numpy as np
import pytest

from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Pair
from tests.end_to_end.plain_media import read_clip

MANY = {**TEXT.fields(), "num_inference_steps": "121"}
"""So many steps that each changes little: the tiny model's weights are random."""


@pytest.fixture(scope="module")
def made(pair: Pair) -> dict[str, dict[str, object]]:
    """A lossless clip, a faster one, and the lossless one again."""
    jobs = {
        name: pair.submit({**MANY, "return_stage_metrics": "true", **({"quality": quality} if quality else {})})
        for name, quality in (("before", None), ("high", "high"), ("after", "lossless"))
    }
    return {name: pair.completed(job) for name, job in jobs.items()}


def test_the_job_says_the_profile_and_how_many_forwards_were_skipped(made: dict[str, dict[str, object]]) -> None:
    high = made["high"]
    assert (high["quality"], high["forwards"]) == ("high", 120)
    cache, metrics, outputs = high["step_cache"], high["metrics"], high["outputs"]
    assert isinstance(cache, dict)
    assert isinstance(metrics, dict)
    assert isinstance(outputs, list)
    skipped = cache.pop("skipped_forwards")
    assert cache == {"profile": "first-block", "threshold": 0.04, "warm_up_forwards": 4, "most_in_a_row": 1}
    assert 10 < skipped <= 58
    assert (metrics["forwards"], metrics["skipped_forwards"]) == (120, skipped)
    assert [each["skipped_forwards"] for each in outputs] == [skipped]


def test_lossless_clips_before_and_after_it_are_the_same_to_the_bit(made: dict[str, dict[str, object]]) -> None:
    digests = ("frames_sha256", "audio_sha256")
    before, high, after = ([made[name][digest] for digest in digests] for name in ("before", "high", "after"))
    assert before == after
    assert set(before).isdisjoint(high)
    for name in ("before", "after"):
        assert (made[name]["quality"], made[name]["step_cache"]) == ("lossless", None)


def test_the_faster_clip_is_near_the_lossless_one(pair: Pair, made: dict[str, dict[str, object]]) -> None:
    lossless, high = (
        read_clip(pair.client.get(f"/v1/videos/{made[name]['id']}/content").content) for name in ("before", "high")
    )
    difference = lossless.frames.astype(np.float64) - high.frames.astype(np.float64)
    assert 20 * np.log10(255 / np.sqrt(np.mean(difference**2))) > 30


def test_metrics_count_them(pair: Pair, made: dict[str, dict[str, object]]) -> None:
    assert made["high"]["status"] == "completed"
    text = httpx.get(f"{pair.diffusion.url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("h3_forwards_skipped_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) > 10
