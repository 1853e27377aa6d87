"""The routes of `/v1/videos`. Runs in the API process."""

import asyncio
import json
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffusion_service.api.content import ClipAnswers
from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.errors import JOB_HTTP_STATUS, error_response
from diffusion_service.api.gate import caller_of, note_job
from diffusion_service.api.intake import Intake
from diffusion_service.api.ownership import check_changes, check_visible
from diffusion_service.api.schema import (
    CLIP,
    CONTENT,
    EVENTS,
    LAST_EVENT,
    PAGE,
    PART,
    REPEAT,
    TRACE,
    VIDEO_ID,
    create_body,
)
from diffusion_service.api.sse import LAST_EVENT_ID
from diffusion_service.api.streams import EventStreams
from diffusion_service.jobs.job import Job, JobFailure
from diffusion_service.jobs.public import video_of
from diffusion_service.jobs.store import Order
from diffusion_service.jobs.trace import chrome
from shared_schema.errors import H3Error, InvalidRequest, JobFailed, NotFound, NotImplementedYet
from shared_schema.videos import Video, VideoDeleted, VideoList

_NO_RETRY = {"x-should-retry": "false"}
_ONE = {"parameters": [VIDEO_ID]}


def videos_router(deps: ApiDeps) -> APIRouter:
    """Every route under `/v1/videos`; the fixed names stand before the ids."""
    routes = _Routes(deps)
    router = APIRouter(prefix="/v1/videos", tags=["videos"])
    # First, because it is asked most; no other GET has this form.
    router.add_api_route("/{video_id}", routes.get, methods=["GET"], response_model=Video, openapi_extra=_ONE)
    _add_all_videos(router, routes)
    _add_not_implemented(router)
    _add_one_video(router, routes)
    return router


def _add_all_videos(router: APIRouter, routes: "_Routes") -> None:
    body = {"requestBody": create_body(), "parameters": REPEAT}
    router.add_api_route("", routes.create, methods=["POST"], response_model=Video, openapi_extra=body)
    router.add_api_route(
        "/sync", routes.create_sync, methods=["POST"], response_class=Response, responses=CLIP, openapi_extra=body
    )
    router.add_api_route(
        "", routes.list_, methods=["GET"], response_model=VideoList, openapi_extra={"parameters": PAGE}
    )


def _add_not_implemented(router: APIRouter) -> None:
    for path in ("/edits", "/extensions", "/characters", "/{video_id}/remix"):
        router.add_api_route(path, _not_implemented, methods=["POST"], include_in_schema=False)
    router.add_api_route("/characters/{name}", _not_implemented, methods=["GET", "DELETE"], include_in_schema=False)


def _add_one_video(router: APIRouter, routes: "_Routes") -> None:
    router.add_api_route(
        "/{video_id}", routes.delete, methods=["DELETE"], response_model=VideoDeleted, openapi_extra=_ONE
    )
    router.add_api_route(
        "/{video_id}/cancel", routes.cancel, methods=["POST"], response_model=Video, openapi_extra=_ONE
    )
    router.add_api_route("/{video_id}/trace", routes.trace, methods=["GET"], responses=TRACE, openapi_extra=_ONE)
    router.add_api_route(
        "/{video_id}/events",
        routes.events,
        methods=["GET"],
        response_class=Response,
        responses=EVENTS,
        openapi_extra={"parameters": [VIDEO_ID, *LAST_EVENT]},
    )
    router.add_api_route(
        "/{video_id}/content",
        routes.content,
        methods=["GET"],
        response_class=Response,
        responses=CONTENT,
        openapi_extra={"parameters": [VIDEO_ID, *PART]},
    )
    router.add_api_route("/{video_id}/content", routes.content, methods=["HEAD"], include_in_schema=False)


class _Routes:
    """The handlers; all of them answer with a response that is already written."""

    def __init__(self, deps: ApiDeps) -> None:
        self._deps = deps
        self._intake = Intake(deps)
        self._streams = EventStreams(deps.store, deps.feed)
        self._clips = ClipAnswers(deps.artifacts, deps.limits.redirect_s)

    async def create(self, request: Request) -> Response:
        """Queue a clip."""
        return await self._answer((await self._intake.accept(request)).job)

    async def create_sync(self, request: Request) -> Response:
        """Make a clip and answer with it; a caller that leaves cancels it, unless an earlier request made the job."""
        accepted = await self._intake.accept(request)
        job = accepted.job
        ended = await self._until_ended(request, job.id, cancel=accepted.fresh)
        if ended is None:
            if await self._deps.store.get(job.id) is None:
                raise NotFound(f"video {job.id} was deleted", param="video_id")
            return _sync_error(JobFailed(f"video {job.id} is not ready yet; it goes on", code="timeout"), job.id)
        if ended.status != "completed":
            return _sync_error(_failure(ended), job.id)
        return await self._clips.clip(request, ended, 0, _sync_headers(ended))

    async def list_(self, request: Request) -> Response:
        """A page of jobs, newest first unless asked otherwise."""
        query, caller = request.query_params, caller_of(request, "read_own")
        limit, order = _limit(query.get("limit", "20")), _order(query.get("order", "desc"))
        key = None if caller.may("read_all") else caller.name
        page = await self._deps.store.page(query.get("after"), limit, order, key=key)
        places = await self._deps.store.places(page.jobs)
        videos = tuple(self._video(job, places.get(job.id)) for job in page.jobs)
        ids = [video.id for video in videos]
        answer = VideoList(
            data=videos, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=page.has_more
        )
        return JSONResponse(answer.model_dump(mode="json"))

    async def get(self, request: Request) -> Response:
        """One job."""
        return await self._answer(await self._job(request))

    async def cancel(self, request: Request) -> Response:
        """End a job; one that has ended stays as it is."""
        job = await self._job(request)
        check_changes(request, job)
        return await self._answer(await self._deps.runner.cancel(job.id))

    async def delete(self, request: Request) -> Response:
        """End a job and forget it, with its files."""
        job = await self._job(request)
        check_changes(request, job)
        await self._deps.runner.remove(job.id)
        return JSONResponse(VideoDeleted(id=job.id).model_dump(mode="json"))

    async def trace(self, request: Request) -> Response:
        """Where the time of an ended job went, as a trace for `chrome://tracing` or ui.perfetto.dev."""
        job = await self._job(request)
        if not job.finished:
            raise NotFound(f"video {job.id} is {job.status}; its trace can be read once it has ended")
        return JSONResponse(chrome(job, job.spans))

    async def events(self, request: Request) -> Response:
        """Every change of a job's status, phase and progress, as server-sent events."""
        return await self._streams.answer(await self._job(request), request.headers.get(LAST_EVENT_ID))

    async def content(self, request: Request) -> Response:
        """The clip, or a picture of it."""
        job = await self._job(request)
        variant = request.query_params.get("variant", "video")
        if variant not in ("video", "thumbnail"):
            raise InvalidRequest(f"variant is video or thumbnail, not {variant[:40]!a}", param="variant")
        index = _index(request.query_params.get("index", "0"), job.plan.num_outputs)
        redirect = _flag(request, "redirect", True)
        if job.status != "completed":
            raise NotFound(f"video {job.id} is {job.status}; its content can be read once it is completed")
        if variant == "video":
            return await self._clips.clip(request, job, index, {}, redirect=redirect)
        return await self._clips.picture(job, index)

    async def _job(self, request: Request) -> Job:
        video_id = request.path_params["video_id"]
        job = await self._deps.store.get(video_id)
        if job is None:
            raise NotFound(f"there is no video {video_id[:64]!a}", param="video_id")
        check_visible(request, job)
        note_job(request, job.id)
        return job

    def _video(self, job: Job, place: int | None) -> Video:
        if job.finished:
            return video_of(job, queue_position=place)
        runner = self._deps.runner
        return video_of(job, queue_position=place, eta_seconds=runner.eta(job, place), step=runner.step(job))

    async def _answer(self, job: Job) -> Response:
        places = await self._deps.store.places([job])
        video = self._video(job, places.get(job.id))
        headers = {"openai-poll-after-ms": str(self._deps.limits.poll_after_ms)}
        return JSONResponse(video.model_dump(mode="json"), headers=headers)

    async def _until_ended(self, request: Request, job_id: str, *, cancel: bool) -> Job | None:
        """The ended job, or None past the time limit. A caller that leaves cancels the job if it may."""
        left = asyncio.create_task(_left(request))
        ended = asyncio.create_task(self._deps.runner.wait(job_id, self._deps.limits.sync_timeout_s))
        try:
            await asyncio.wait({left, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            return await self._deps.runner.cancel(job_id) if cancel else None
        finally:
            await _stop(left, ended)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _not_implemented() -> Response:
    raise NotImplementedYet("this server does not edit, extend or remix videos, and has no characters")


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= 100):
        raise InvalidRequest("limit is 1 to 100", param="limit")
    return int(text)


def _index(text: str, outputs: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 2 and int(text) < outputs):
        only = "0: this video has one output" if outputs == 1 else f"0 to {outputs - 1}"
        raise InvalidRequest(f"index is {only}", param="index")
    return int(text)


def _flag(request: Request, name: str, default: bool) -> bool:
    match request.query_params.get(name):
        case None:
            return default
        case "true":
            return True
        case "false":
            return False
        case _:
            raise InvalidRequest(f"{name} is true or false", param=name)


def _order(text: str) -> Order:
    match text:
        case "asc" | "desc":
            return text
        case _:
            raise InvalidRequest("order is asc or desc", param="order")


def _failure(job: Job) -> JobFailed:
    failure = job.error or JobFailure(code="cancelled", message=f"video {job.id} was cancelled")
    return JobFailed(failure.message, code=failure.code, param=failure.param)


def _sync_error(error: H3Error, job_id: str) -> Response:
    return error_response(error, status=JOB_HTTP_STATUS[error.code], headers={**_NO_RETRY, "X-Video-Id": job_id})


def _sync_headers(job: Job) -> dict[str, str]:
    video = video_of(job)
    return {
        "X-Video-Id": job.id,
        "X-Model": quote(video.model, safe="/:@ ._-"),
        "X-Inference-Time-S": f"{video.inference_time_s or 0.0:.3f}",
        "X-Stage-Durations": json.dumps(video.stage_durations),
        "X-Peak-Memory-MB": f"{video.peak_memory_mb or 0.0:.1f}",
    }
