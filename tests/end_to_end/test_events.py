"""Events and webhooks of a live pair, over the end and the new start of its service."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared_schema.videos import Video
from tests.diffusion_service.receiver import SECRET, Receiver, receiving
from tests.end_to_end import processes
from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import START_S, Pair, make_pair
from video_client import events as events_module
from video_client.client import VideoClient

pytestmark = pytest.mark.slow

LONG = {**TEXT.fields(), "size": "128x64", "num_frames": "362", "num_inference_steps": "200"}
DRAIN_S = 1.0
STREAMS = 20


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Where the ends of jobs are told."""
    with receiving() as one:
        yield one


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    """A pair that may tell receivers of this host, and drains quickly."""
    root = tmp_path_factory.mktemp("told")
    secret = root / "secret"
    secret.write_text(SECRET)
    hook = f"{{hosts: [{{host: 127.0.0.1, private: true}}], secret_file: {secret}}}"
    pair = make_pair(root, str(checkpoint), {"webhook": hook, "drain_s": DRAIN_S})
    with pair.running():
        yield pair


def events_of(pair: Pair, job: str) -> list[dict[str, Any]]:
    """Everything that the job's stream says until it ends."""
    with pair.client.stream("GET", f"/v1/videos/{job}/events") as answer:
        assert answer.status_code == 200
        return [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]


def test_a_job_is_told_from_its_first_phase_to_the_moment_it_can_be_read(told: Pair, receiver: Receiver) -> None:
    job = told.submit({**TEXT.fields(), "webhook_url": receiver.url})
    events = events_of(told, job)
    assert told.client.head(f"/v1/videos/{job}/content").status_code == 200
    progress = [event["progress"] for event in events]
    assert progress == sorted(progress)
    assert progress[-1] == 100
    phases = list(dict.fromkeys(event["phase"] for event in events))
    assert phases == ["queued", "encoding", "transferring", "denoising", "decoding", "muxing", None]
    assert [event["type"] for event in events[-1:]] == ["video.completed"]
    processes.wait_until(lambda: (told.video(job)["webhook"] or {}).get("state") == "delivered", 60, "told")  # type: ignore[attr-defined]
    event = receiver.messages[-1].event()
    assert (event["type"], event["data"]["id"]) == ("video.completed", job)
    assert event["data"]["frames_sha256"] == told.video(job)["frames_sha256"]


def test_a_host_that_is_not_listed_is_refused_by_name(told: Pair) -> None:
    for url in ("http://localhost/hook", "http://169.254.169.254/", "file:///etc/passwd", "hook"):
        answer = told.post({**TEXT.fields(), "webhook_url": url})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook_url"), url


def test_term_waits_for_no_stream_and_a_client_goes_on_after_the_new_start(
    told: Pair, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "AWAY_S", START_S)
    job = told.submit({**LONG, "webhook_url": receiver.url})
    told.wait_phase(job, "denoising")
    ends: list[str | None] = []
    seen: list[Video] = []

    def follow() -> None:
        with VideoClient(told.diffusion.url) as client:
            seen.append(client.wait(job, timeout_s=START_S, on_change=seen.append))

    def hold() -> None:
        try:
            events_of(told, job)
            ends.append(None)
        except httpx.HTTPError as error:
            ends.append(repr(error))

    threads = [threading.Thread(target=hold) for _ in range(STREAMS)]
    following = threading.Thread(target=follow)
    for thread in (*threads, following):
        thread.start()
    processes.wait_until(lambda: len(seen) > 0, 60, "the client follows")
    assert told.diffusion.stop() == 0
    for thread in threads:
        thread.join(60)
    assert ends == [None] * STREAMS, "every stream ended in order"
    assert "Traceback" not in told.diffusion.tail(400)
    told.diffusion.start()
    told.wait_ready()
    assert told.client.post(f"/v1/videos/{job}/cancel").status_code == 200
    following.join(120)
    assert seen[-1].status == "cancelled"
    processes.wait_until(lambda: receiver.messages[-1].event()["data"]["id"] == job, 60, "told of the cancelled job")
    assert receiver.messages[-1].event()["type"] == "video.cancelled"
