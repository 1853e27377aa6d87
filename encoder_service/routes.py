"""The encoder's internal HTTP API: encodings, pushes, probes, tokens, and health. Runs in its API process."""

import asyncio
import json
import os
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from encoder_service.commands import Pushed
from encoder_service.encoder import Encoder
from encoder_service.token_gate import TokenGate
from shared_runtime.answers import AnswerAccounts, CountAnswers
from shared_runtime.errands import Errands
from shared_runtime.metrics import CONTENT_TYPE, exposition
from shared_runtime.spans_out import Export
from shared_runtime.tracing import collected
from shared_schema.encode import (
    READ_VERSIONS,
    EncodeProgress,
    EncodeRequest,
    EncoderIdentity,
    Encoding,
    ProbeRequest,
    PushReceipt,
    PushRequest,
    TokensAnswer,
    TokensRequest,
)
from shared_schema.errors import ErrorBody, H3Error, InvalidRequest, NotFound, NotReady, TaskCancelled
from shared_schema.health import Health
from shared_schema.tasks import MediaCaps, ReferenceLimits

SAFETENSORS = "application/octet-stream"
_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "Any other answer."}}
_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not ready, and why."}}
_INLINE: dict[int | str, dict[str, Any]] = {
    200: {"content": {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}, "description": "Pushed."}
}


@dataclass(frozen=True)
class EncoderDeps:
    """What the routes work with."""

    encoder: Encoder
    identity: EncoderIdentity
    token: str | None
    registry: CollectorRegistry
    """What `/metrics` shows."""
    export: Export
    """Takes the spans of a request that came with a `traceparent`."""


def build_app(deps: EncoderDeps) -> FastAPI:
    """The encoder's ASGI application."""
    app = FastAPI(title="MiniMax-H3 encoder service", openapi_url="/openapi.json")
    app.add_exception_handler(H3Error, _answer_error)
    for invalid in (ValidationError, RequestValidationError):
        app.add_exception_handler(invalid, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_refused)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_fault)
    app.add_middleware(TokenGate, token=deps.token)
    app.add_middleware(Errands, process="encoder-api", export=deps.export)
    app.add_middleware(CountAnswers, accounts=AnswerAccounts(deps.registry))
    app.include_router(_health_routes(deps))
    app.include_router(_peer_routes(deps), responses=_ERRORS)
    app.include_router(_encoding_routes(deps), responses=_ERRORS)
    return app


async def _answer_nobody(_request: Request, _gone: Exception) -> Response:
    """Nobody reads it; the server wants an answer all the same."""
    return _error(InvalidRequest("the client left before its body was read"))


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, H3Error)
    return _error(error)


async def _answer_invalid(_request: Request, error: Exception) -> Response:
    return _error(InvalidRequest(str(error), param="request"))


async def _answer_refused(_request: Request, error: Exception) -> Response:
    """The framework's own refusals: no such route, a method it does not take, a form that cannot be read."""
    assert isinstance(error, HTTPException)
    refused = NotFound("there is no such route") if error.status_code == 404 else InvalidRequest(str(error.detail))
    return _error(refused, status=error.status_code, headers=error.headers)


async def _answer_fault(_request: Request, _error_that_is_logged: Exception) -> Response:
    return _error(H3Error("an internal error; the encoder's log has it"))


def _error(error: H3Error, *, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII: half a surrogate pair of the caller's own text has no other form.
    body = json.dumps(error.body().model_dump())
    return Response(body, status_code=status or error.status, headers=headers, media_type="application/json")


def _health_routes(deps: EncoderDeps) -> APIRouter:
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @routes.get("/readyz", responses=_NOT_READY)
    @routes.get("/health", responses=_NOT_READY)
    async def readyz(response: Response) -> Health:
        report = deps.encoder.health()
        response.status_code = 200 if report.status == "healthy" else 503
        return report

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(exposition(deps.registry), media_type=CONTENT_TYPE)

    return routes


def _peer_routes(deps: EncoderDeps) -> APIRouter:
    """What a diffusion service asks before it has anything encoded."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/identity")
    async def identity() -> EncoderIdentity:
        return deps.identity

    @routes.post("/probes", response_model=PushReceipt, responses=_INLINE)
    async def probe(body: ProbeRequest) -> Response | PushReceipt:
        return _pushed(await deps.encoder.probe(body.landing, body.bytes))

    @routes.post("/tokens")
    async def tokens(body: TokensRequest) -> TokensAnswer:
        return TokensAnswer(tokens=await deps.encoder.count_tokens(body.prompt))

    return routes


def _encoding_routes(deps: EncoderDeps) -> APIRouter:
    """One encoding, from its request to its push."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/encodings", openapi_extra=_encode_body())
    async def encode(http: Request) -> Encoding:
        async with http.form(max_files=ReferenceLimits().total, max_part_size=MediaCaps().image_bytes) as form:
            request = _read_request(form.get("request"))
            uploads = [part for part in form.getlist("file") if isinstance(part, UploadFile)]
            if len(uploads) != len(request.references):
                raise InvalidRequest(f"{len(uploads)} files for {len(request.references)} references", param="file")
            files = tuple(_unnamed_path(upload) for upload in uploads)
            made = await _unless_gone(http, deps.encoder.encode(request, files))
            return made.model_copy(update={"spans": collected()})

    @routes.get("/encodings/{request_id}/progress")
    async def progress(request_id: str) -> EncodeProgress:
        return deps.encoder.progress(request_id)

    @routes.post("/encodings/{encoding_id}/push", response_model=PushReceipt, responses=_INLINE)
    async def push(encoding_id: str, body: PushRequest) -> Response | PushReceipt:
        return _pushed(await deps.encoder.push(encoding_id, body.landing))

    @routes.post("/encodings/{encoding_id}/lease")
    async def lease(encoding_id: str) -> dict[str, float]:
        return {"expires_at": deps.encoder.renew(encoding_id)}

    @routes.delete("/encodings/{encoding_id}")
    async def drop(encoding_id: str) -> dict[str, bool]:
        await deps.encoder.drop(encoding_id)
        return {"deleted": True}

    return routes


def _encode_body() -> dict[str, Any]:
    """How `/openapi.json` describes the form of an encoding."""
    text = {"type": "string", "contentMediaType": "application/json", "description": "An EncodeRequest."}
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "maxItems": ReferenceLimits().total}
    properties = {"request": text, "file": files}
    form = {"type": "object", "required": ["request"], "properties": properties, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


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
        return pushed.receipt.model_copy(update={"spans": collected()})
    return Response(pushed.blob, media_type=SAFETENSORS, headers={"x-checksum": pushed.receipt.checksum})
