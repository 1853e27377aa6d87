"""The encoder's internal HTTP API: encodings, pushes, probes, tokens, and health. Runs in its API process."""

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import cast

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import UploadFile

from encoder_service.commands import Pushed
from encoder_service.encoder import Encoder
from shared_runtime.metrics import CONTENT_TYPE, exposition
from shared_runtime.ranks.group import RankGroup
from shared_schema.encode import (
    READ_VERSIONS,
    EncodeRequest,
    EncoderIdentity,
    Encoding,
    ProbeRequest,
    PushReceipt,
    PushRequest,
    TokensAnswer,
    TokensRequest,
)
from shared_schema.errors import H3Error, InvalidRequest, NotReady, RequestError, TaskCancelled
from shared_schema.health import Health
from shared_schema.tasks import MediaCaps, ReferenceLimits

SAFETENSORS = "application/octet-stream"


class WrongToken(RequestError):
    """The caller does not know the token that both services share."""

    status = 401
    default_code = "invalid_token"


@dataclass(frozen=True)
class EncoderDeps:
    """What the routes work with."""

    encoder: Encoder
    group: RankGroup
    identity: EncoderIdentity
    token: str | None
    registry: CollectorRegistry
    """What `/metrics` shows."""


def build_app(deps: EncoderDeps) -> FastAPI:
    """The encoder's ASGI application."""
    app = FastAPI(title="MiniMax-H3 encoder service", openapi_url="/openapi.json")
    app.add_exception_handler(H3Error, _answer_error)
    app.add_exception_handler(ValidationError, _answer_invalid)
    app.include_router(_health_routes(deps))
    app.include_router(_encoding_routes(deps))
    return app


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, H3Error)
    return JSONResponse(error.body().model_dump(), status_code=error.status)


async def _answer_invalid(_request: Request, error: Exception) -> Response:
    invalid = InvalidRequest(str(error), param="request")
    return JSONResponse(invalid.body().model_dump(), status_code=invalid.status)


def _guard(token: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise WrongToken("this service needs the internal token that its peers share")

    return check


def _health_routes(deps: EncoderDeps) -> APIRouter:
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @routes.get("/readyz")
    @routes.get("/health")
    async def readyz(response: Response) -> Health:
        report = health_of(deps.group)
        response.status_code = 200 if report.status == "healthy" else 503
        return report

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(deps.registry), media_type=CONTENT_TYPE)

    return routes


def health_of(group: RankGroup) -> Health:
    """Healthy once the ranks are ready."""
    return Health(
        status="healthy" if group.ready else "unhealthy",
        reason=None if group.ready else "the encoder's ranks are not ready",
        ranks=group.health(),
        restarts=group.restarts,
    )


def _encoding_routes(deps: EncoderDeps) -> APIRouter:
    routes = APIRouter(prefix="/v1", dependencies=[Depends(_guard(deps.token))])

    @routes.get("/identity")
    async def identity() -> EncoderIdentity:
        return deps.identity

    @routes.post("/encodings")
    async def encode(http: Request) -> Encoding:
        async with http.form(max_files=ReferenceLimits().total, max_part_size=MediaCaps().image_bytes) as form:
            request = _read_request(form.get("request"))
            uploads = [part for part in form.getlist("file") if isinstance(part, UploadFile)]
            if len(uploads) != len(request.references):
                raise InvalidRequest(f"{len(uploads)} files for {len(request.references)} references", param="file")
            files = tuple(_unnamed_path(upload) for upload in uploads)
            return await _unless_gone(http, deps.encoder.encode(request, files))

    @routes.post("/encodings/{encoding_id}/push", response_model=PushReceipt)
    async def push(encoding_id: str, body: PushRequest) -> Response | PushReceipt:
        return _pushed(await deps.encoder.push(encoding_id, body.landing))

    @routes.post("/encodings/{encoding_id}/lease")
    async def lease(encoding_id: str) -> dict[str, float]:
        return {"expires_at": deps.encoder.renew(encoding_id)}

    @routes.delete("/encodings/{encoding_id}")
    async def drop(encoding_id: str) -> dict[str, bool]:
        await deps.encoder.drop(encoding_id)
        return {"deleted": True}

    @routes.post("/probes", response_model=PushReceipt)
    async def probe(body: ProbeRequest) -> Response | PushReceipt:
        return _pushed(await deps.encoder.probe(body.landing, body.bytes))

    @routes.post("/tokens")
    async def tokens(body: TokensRequest) -> TokensAnswer:
        return TokensAnswer(tokens=await deps.encoder.count_tokens(body.prompt))

    return routes


async def _unless_gone(http: Request, work: Coroutine[None, None, Encoding]) -> Encoding:
    """Do `work`, and cancel it once its caller has hung up or the service stops."""
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_hung_up(http))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()  # does nothing to a finished task
        return await working
    except asyncio.CancelledError as error:
        if listening.done():
            raise TaskCancelled("the caller hung up") from error
        raise NotReady("the encoder is stopping") from error
    finally:
        working.cancel()
        listening.cancel()


async def _hung_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _read_request(part: object) -> EncodeRequest:
    if not isinstance(part, str):
        raise InvalidRequest("part `request` with the JSON of an EncodeRequest is missing", param="request")
    request = TypeAdapter(EncodeRequest).validate_json(part)
    if request.schema_version not in READ_VERSIONS:
        raise InvalidRequest(
            f"schema version {request.schema_version} is not read here, only {sorted(READ_VERSIONS)}", param="request"
        )
    return request


def _unnamed_path(upload: UploadFile) -> Path:
    """A path under which our ranks can open an upload that has no name, and so cannot be left behind."""
    spooled = cast("SpooledTemporaryFile[bytes]", upload.file)
    spooled.rollover()
    spooled.flush()
    return Path(f"/proc/{os.getpid()}/fd/{spooled.fileno()}")


def _pushed(pushed: Pushed) -> Response | PushReceipt:
    if pushed.blob is None:
        return pushed.receipt
    return Response(pushed.blob, media_type=SAFETENSORS, headers={"x-checksum": pushed.receipt.checksum})
