"""Clips that lie in an object store: read through with ranges, or a link into the store."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diffusion_service.api.content import ClipAnswers, Span, span_of
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.shelves.objects import READ_BYTES, ObjectShelf
from shared_schema.errors import NotFound
from tests.diffusion_service.jobs.test_store import new_job
from tests.diffusion_service.test_mux import write
from tests.objects import Bucket

JOB = new_job(1)
Check = Callable[[httpx.AsyncClient], Awaitable[None]]


def ask(artifacts: Artifacts, check: Check, redirect_s: float | None = None) -> None:
    """Run `check` against a route that answers with the clip."""
    answers = ClipAnswers(artifacts, redirect_s)

    async def clip(request: Request) -> Response:
        redirect = "stay" not in request.query_params
        return await answers.clip(request, JOB, 0, {"X-Video-Id": JOB.id}, redirect=redirect)

    async def run() -> None:
        app = Starlette(routes=[Route("/clip", clip, methods=["GET", "HEAD"])])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://h3") as client:
            await check(client)

    asyncio.run(run())


@pytest.fixture
def clip() -> bytes:
    return bytes(range(251)) * (READ_BYTES // 251 + 9)


@pytest.fixture
def artifacts(bucket: Bucket, tmp_path: Path, clip: bytes) -> Artifacts:
    made = Artifacts(tmp_path, ObjectShelf(*bucket, tmp_path / "parts"))
    made.part(JOB.id).write_bytes(clip)
    made.publish(JOB.id)
    return made


def test_a_clip_in_a_store_is_read_through_with_ranges(artifacts: Artifacts, clip: bytes) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        whole = await client.get("/clip")
        assert (whole.status_code, whole.content, whole.headers["content-type"]) == (200, clip, "video/mp4")
        assert whole.headers["x-video-id"] == JOB.id
        assert whole.headers["accept-ranges"] == "bytes"
        size, tag = len(clip), whole.headers["etag"]
        for asked, start, end in (
            ("bytes=10-19", 10, 20),
            (f"bytes={size - 7}-", size - 7, size),
            ("bytes=-5", -5, size),
        ):
            some = await client.get("/clip", headers={"range": asked, "if-range": tag})
            assert (some.status_code, some.content) == (206, clip[start:end])
            assert some.headers["content-range"] == f"bytes {start % size}-{end - 1}/{size}"
        other = await client.get("/clip", headers={"range": "bytes=0-1", "if-range": '"another"'})
        assert (other.status_code, len(other.content)) == (200, size)
        head = await client.head("/clip", headers={"range": "bytes=0-9"})
        assert (head.status_code, head.content, head.headers["content-length"]) == (206, b"", "10")
        beyond = await client.get("/clip", headers={"range": f"bytes={size}-"})
        assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")

    ask(artifacts, check)
    artifacts.close()


def test_a_clip_in_a_store_can_be_a_link_into_it(artifacts: Artifacts, clip: bytes) -> None:
    async def check(client: httpx.AsyncClient) -> None:
        answer = await client.get("/clip")
        assert (answer.status_code, answer.headers["cache-control"]) == (307, "no-store")
        async with httpx.AsyncClient(trust_env=False) as outside:
            some = await outside.get(answer.headers["location"], headers={"range": "bytes=0-9"})
        assert some.content == clip[:10]
        stays = await client.get("/clip", params={"stay": ""}, headers={"range": "bytes=0-9"})
        assert (stays.status_code, stays.content) == (206, clip[:10])
        # A link is signed for one method.
        assert (await client.head("/clip")).status_code == 200

    ask(artifacts, check, redirect_s=60)
    artifacts.close()


def test_a_clip_that_is_gone_from_the_store_is_not_found(artifacts: Artifacts) -> None:
    artifacts.drop_clips(JOB.id)

    async def check(client: httpx.AsyncClient) -> None:
        with pytest.raises(NotFound):
            await client.get("/clip")

    ask(artifacts, check)
    artifacts.close()


def test_a_picture_is_made_of_a_clip_in_a_store(bucket: Bucket, tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, ObjectShelf(*bucket, tmp_path / "parts"))
    write(artifacts.part(JOB.id), 107)
    artifacts.publish(JOB.id)
    picture = asyncio.run(ClipAnswers(artifacts, None).picture(JOB, 0))
    assert (picture.media_type, bytes(picture.body)[:3]) == ("image/jpeg", b"\xff\xd8\xff")
    artifacts.close()


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        (None, Span(0, 100)),
        ("bytes=0-", Span(0, 100)),
        ("bytes=0-0", Span(0, 1)),
        ("bytes=90-200", Span(90, 100)),
        ("bytes=-200", Span(0, 100)),
        ("bytes=-0", None),
        ("bytes=100-", None),
        ("bytes=9-3", None),
        ("bytes=-", Span(0, 100)),
        ("bytes=0-1,5-6", Span(0, 100)),
        ("lines=0-1", Span(0, 100)),
        ("bytes=x-", Span(0, 100)),
    ],
)
def test_a_range_is_read_as_http_says(asked: str | None, span: Span | None) -> None:
    assert span_of(asked, 100) == span
