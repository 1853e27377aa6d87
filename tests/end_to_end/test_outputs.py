"""Several clips of one request: each has its seed, its file and the digest that a job of its own would have."""

from pathlib import Path

import pytest

from tests.end_to_end.clips import EQUAL_CLIPS, Clip
from tests.end_to_end.pair import Pair

COUNT = 3
CLIPS = [*(pytest.param(clip, marks=pytest.mark.slow) for clip in EQUAL_CLIPS[:2]), EQUAL_CLIPS[7]]


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.name)
def test_every_output_equals_the_job_of_its_own_seed(pair: Pair, cases: Path, clip: Clip) -> None:
    fields, parts = clip.fields(), clip.parts(cases)
    many = pair.submit({**fields, "num_outputs_per_prompt": str(COUNT)}, parts)
    alone = [pair.submit({**fields, "seed": str(clip.seed + index)}, parts) for index in range(COUNT)]
    video = pair.completed(many)
    assert video["num_outputs"] == COUNT
    outputs = video["outputs"]
    assert isinstance(outputs, list)
    assert [(each["index"], each["seed"]) for each in outputs] == [(i, clip.seed + i) for i in range(COUNT)]
    for index, job in enumerate(alone):
        (single,) = pair.completed(job)["outputs"]  # type: ignore[misc]
        assert {**single, "index": index} == outputs[index]
        content = pair.client.get(f"/v1/videos/{many}/content", params={"index": index}).content
        assert content == pair.client.get(f"/v1/videos/{job}/content").content
        assert len(content) == outputs[index]["bytes"]
    assert len({each["frames_sha256"] for each in outputs}) == COUNT
    assert pair.client.delete(f"/v1/videos/{many}").status_code == 200
    assert not list(pair.state.rglob(f"{many}*"))
