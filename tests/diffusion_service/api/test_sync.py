"""`POST /v1/videos/sync`: one answer for a whole job."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from diffusion_service.jobs.job import JobFailure
from tests.diffusion_service.api.served import LIMITS, Served, serve

GOOD: dict[str, object] = {"prompt": "a red ball", "size": "64x64", "num_frames": 107}


async def sync(served: Served, end: str) -> tuple[int, dict[str, str], bytes]:
    """A synchronous request whose job ends that way."""
    posting = asyncio.create_task(served.post(GOOD, path="/v1/videos/sync"))
    while not (jobs := await served.store.unfinished()):
        await asyncio.sleep(0.01)
    if end == "completed":
        await served.runner.finish(jobs[0].id, b"clip")
    elif end == "cancelled":
        await served.runner.cancel(jobs[0].id)
    elif end == "deleted":
        await served.runner.remove(jobs[0].id)
    elif end != "never":
        await served.runner.fail(jobs[0].id, JobFailure(code=end, message="why"))  # type: ignore[arg-type]
    answer = await posting
    return answer.status_code, dict(answer.headers), answer.content


def test_sync_answers_with_the_clip_and_its_facts(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        status, headers, content = await sync(served, "completed")
        assert (status, content, headers["content-type"]) == (200, b"clip", "video/mp4")
        assert headers["x-video-id"] in await served.store.ids()
        assert headers["x-model"] == "tiny"
        assert float(headers["x-inference-time-s"]) == 0.0
        assert json.loads(headers["x-stage-durations"]) == {"denoise": 1.0}
        assert float(headers["x-peak-memory-mb"]) >= 0
        assert headers["x-request-id"]

    serve(tmp_path, body)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("invalid_input", 400),
        ("out_of_memory", 503),
        ("worker_died", 503),
        ("timeout", 504),
        ("internal_error", 500),
        ("cancelled", 400),
    ],
)
def test_sync_answers_a_failed_job_by_its_code(tmp_path: Path, end: str, status: int) -> None:
    async def body(served: Served) -> None:
        answered, headers, content = await sync(served, end)
        assert (answered, headers["x-should-retry"]) == (status, "false")
        assert json.loads(content)["error"]["code"] == end
        assert headers["x-video-id"] in await served.store.ids()

    serve(tmp_path, body)


def test_sync_past_its_limit_is_504_and_the_job_goes_on(tmp_path: Path) -> None:  # case 21
    async def body(served: Served) -> None:
        status, headers, content = await sync(served, "never")
        assert (status, headers["x-should-retry"]) == (504, "false")
        job = await served.store.get(headers["x-video-id"])
        assert job is not None
        assert not job.finished
        assert job.id in json.loads(content)["error"]["message"]
        assert served.runner.cancelled == []

    serve(tmp_path, body, dataclasses.replace(LIMITS, sync_timeout_s=0.1))


def test_sync_whose_job_is_deleted_is_404(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        status, _, _ = await sync(served, "deleted")
        assert status == 404

    serve(tmp_path, body)
