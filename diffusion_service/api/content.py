"""A finished clip as an answer: a file of this machine, or read through from an object store, or a link into it.

Runs in the API process.
"""

import io
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.shelves.shelf import StoredClip, clip_name
from diffusion_service.mux import thumbnail
from shared_schema.errors import NotFound, StorageUnavailable

MEDIA_TYPE = "video/mp4"
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


@dataclass(frozen=True)
class Span:
    """Bytes from `start` up to, without, `end`."""

    start: int
    end: int


class ClipAnswers:
    """Answers with clips. `redirect_s`: instead of reading a clip through, name a URL that is good for that long."""

    def __init__(self, artifacts: Artifacts, redirect_s: float | None) -> None:
        self._artifacts = artifacts
        self._redirect_s = redirect_s

    async def clip(
        self, request: Request, job: Job, index: int, headers: Mapping[str, str], *, redirect: bool = True
    ) -> Response:
        """The clip, whole or the part that `Range` names. `redirect`: the caller can follow one to the store.

        Raises:
            NotFound: it is gone.
        """
        try:
            found, facts = await run_in_threadpool(self._find, job.id, index)
        except FileNotFoundError as error:
            raise _gone(job) from error
        if isinstance(found, Path):
            return FileResponse(found, media_type=MEDIA_TYPE, filename=found.name, stat_result=facts, headers=headers)
        if redirect and self._redirect_s is not None and request.method == "GET":
            url = await run_in_threadpool(found.url, self._redirect_s)
            return RedirectResponse(url, 307, {**headers, "Cache-Control": "no-store"})
        return await self._through(request, job, index, found, headers)

    async def picture(self, job: Job, index: int) -> Response:
        """The clip's first frame as a JPEG.

        Raises:
            NotFound: the clip is gone.
        """
        try:
            return Response(await run_in_threadpool(self._thumbnail, job.id, index), media_type="image/jpeg")
        except FileNotFoundError as error:
            raise _gone(job) from error

    def _find(self, job_id: str, index: int) -> tuple[Path | StoredClip, os.stat_result | None]:
        found = self._artifacts.clip(job_id, index)
        if not isinstance(found, Path):
            return found, None
        try:
            return found, found.stat()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageUnavailable(f"the folder of inputs and clips: {error.strerror}") from error

    def _thumbnail(self, job_id: str, index: int) -> bytes:
        found = self._artifacts.clip(job_id, index)
        return thumbnail(found if isinstance(found, Path) else io.BytesIO(found.whole()))

    async def _through(
        self, request: Request, job: Job, index: int, clip: StoredClip, headers: Mapping[str, str]
    ) -> Response:
        """Read a clip from its store, as far as it was asked for."""
        tag = f'"{job.id}-{index}"'
        asked = request.headers.get("range") if request.headers.get("if-range", tag) == tag else None
        span = span_of(asked, clip.size)
        told = {
            **headers,
            "Accept-Ranges": "bytes",
            "ETag": tag,
            "Content-Disposition": f'attachment; filename="{clip_name(job.id, index)}"',
        }
        if span is None:
            return Response(status_code=416, headers={**told, "Content-Range": f"bytes */{clip.size}"})
        told["Content-Length"] = str(span.end - span.start)
        if asked is not None and span != Span(0, clip.size):
            told["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{clip.size}"
        status = 206 if "Content-Range" in told else 200
        if request.method == "HEAD":
            return Response(status_code=status, headers=told, media_type=MEDIA_TYPE)
        return StreamingResponse(_chunks(clip, span), status, told, MEDIA_TYPE)


def span_of(asked: str | None, size: int) -> Span | None:
    """What a `Range` header means for that many bytes: all where it names no single range, None where none are left."""
    match = asked and _RANGE.fullmatch(asked.replace(" ", ""))
    if not match or match.groups() == ("", ""):
        return Span(0, size)
    first, last = match.groups()
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
    return Span(start, end) if start < end else None


async def _chunks(clip: StoredClip, span: Span) -> AsyncIterator[bytes]:
    reading: Iterator[bytes] = clip.read(span.start, span.end)
    async for chunk in iterate_in_threadpool(reading):
        yield chunk


def _gone(job: Job) -> NotFound:
    return NotFound(f"the content of video {job.id} is gone")
