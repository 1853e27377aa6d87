"""Cancel and delete in every phase: the work stops, nothing is left, and the next clip is the same as ever."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end import processes
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT, form
from tests.end_to_end.pair import Pair

LONG = {**TEXT.fields(), "size": "128x64", "num_frames": "362", "num_inference_steps": "200"}
LONG_DECODE = {**LONG, "num_inference_steps": "2"}
MIXED = EQUAL_CLIPS[8]


@pytest.fixture(scope="module")
def digest(pair: Pair) -> str:
    """Of a clip made before anything was cancelled."""
    return str(pair.completed(pair.submit(TEXT.fields()))["frames_sha256"])


@pytest.fixture(autouse=True)
def _next_clip_is_the_same_and_nothing_is_left(pair: Pair, digest: str) -> Iterator[None]:
    yield
    assert pair.completed(pair.submit(TEXT.fields()))["frames_sha256"] == digest
    assert pair.unfinished_files() == []


def cancel(pair: Pair, job: str) -> dict[str, object]:
    """`POST .../cancel` and the job it answers with."""
    answer = pair.client.post(f"/v1/videos/{job}/cancel")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def assert_cancelled(pair: Pair, job: str) -> None:
    """Cancelled for good: no clip, and cancelling again changes nothing."""
    video = pair.video(job)
    assert (video["status"], video["phase"]) == ("cancelled", None)
    assert cancel(pair, job)["completed_at"] == video["completed_at"]
    assert pair.client.get(f"/v1/videos/{job}/content").status_code == 404


def test_cancel_while_queued(pair: Pair) -> None:
    running, waiting = pair.submit(LONG), pair.submit(LONG)
    last = pair.submit(TEXT.fields())
    pair.wait_phase(running, "denoising")
    assert pair.video(last)["status"] == "queued"
    assert cancel(pair, last)["status"] == "cancelled"
    for job in (waiting, running):
        cancel(pair, job)
        assert_cancelled(pair, job)
    assert_cancelled(pair, last)


def test_cancel_while_encoding(pair: Pair, cases: Path) -> None:
    with processes.frozen(pair.encoder.rank_pids()):
        fields = {**MIXED.fields(), "prompt": "<Picture 1>, <Video 1> and <Audio 2>, not encoded before"}
        job = pair.submit(fields, MIXED.parts(cases))
        pair.wait_phase(job, "encoding")
        stopping = threading.Thread(target=cancel, args=(pair, job))
        stopping.start()
        time.sleep(0.3)
    stopping.join(30)
    assert not stopping.is_alive()
    assert_cancelled(pair, job)


def test_cancel_while_denoising_stops_within_a_step(pair: Pair) -> None:
    job = pair.submit(LONG)
    pair.wait_phase(job, "denoising")
    begun = time.monotonic()
    assert cancel(pair, job)["status"] == "cancelled"
    assert time.monotonic() - begun < 10, "a step takes a fraction of a second here"
    assert_cancelled(pair, job)


def test_cancel_while_decoding(pair: Pair) -> None:
    job = pair.submit(LONG_DECODE)
    pair.wait_phase(job, "decoding")
    assert cancel(pair, job)["status"] == "cancelled"
    assert_cancelled(pair, job)


@pytest.mark.slow
def test_cancel_at_random_times_reaches_the_phases_between(pair: Pair, cases: Path) -> None:
    # cases 2 and 46
    choose = random.Random(46)
    begun = time.monotonic()
    pair.completed(pair.submit(MIXED.fields(), MIXED.parts(cases)))
    whole = time.monotonic() - begun
    for n in range(12):
        job = pair.submit(
            {**MIXED.fields(), "prompt": f"<Picture 1>, <Video 1> and <Audio 2>, {n}"}, MIXED.parts(cases)
        )
        time.sleep(whole * choose.uniform(0, 1.2))
        if n % 2:
            assert pair.client.delete(f"/v1/videos/{job}").status_code == 200
            assert pair.client.get(f"/v1/videos/{job}").status_code == 404
        else:
            assert cancel(pair, job)["status"] in ("cancelled", "completed")


def test_delete_of_a_running_job_lets_the_next_one_run(pair: Pair) -> None:
    # case 1
    running, following = pair.submit(LONG), pair.submit(TEXT.fields())
    pair.wait_phase(running, "denoising")
    answer = pair.client.delete(f"/v1/videos/{running}")
    assert answer.json() == {"id": running, "deleted": True, "object": "video.deleted"}
    assert pair.client.get(f"/v1/videos/{running}").status_code == 404
    pair.completed(following, timeout_s=60)
    assert not list(pair.state.rglob(f"{running}*"))


def test_a_client_that_leaves_sync_cancels_its_job(pair: Pair) -> None:
    known = {job["id"] for job in pair.client.get("/v1/videos").json()["data"]}
    with pytest.raises(Exception, match="timed out"):
        pair.client.post("/v1/videos/sync", files=form(LONG), timeout=2)
    (job,) = (job["id"] for job in pair.client.get("/v1/videos").json()["data"] if job["id"] not in known)
    assert pair.wait_final(job, timeout_s=60)["status"] == "cancelled"
