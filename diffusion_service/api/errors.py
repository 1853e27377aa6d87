"""The one boundary where errors become answers, and where every answer gets its request id. Runs in the API process."""

import logging
import math
from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared_runtime.errands import request_id_of
from shared_runtime.tracing import Errand, working_for
from shared_schema.errors import (
    ErrorBody,
    ErrorDetail,
    H3Error,
    InvalidRequest,
    NotFound,
    NotImplementedYet,
    RequestError,
    StorageUnavailable,
    StoreUnavailable,
    Unauthorized,
)

JOB_HTTP_STATUS: Final[dict[str, int]] = {
    "invalid_input": 400,
    "out_of_memory": 503,
    "encoder_unavailable": 503,
    "transfer_failed": 503,
    "worker_died": 503,
    "numerical_error": 500,
    "timeout": 504,
    "cancelled": 400,
    "internal_error": 500,
}
"""What `POST /v1/videos/sync` answers when its job failed with that `JobErrorCode`."""

_LOG = logging.getLogger(__name__)


def install_errors(app: FastAPI) -> None:
    """Make every error of `app` an error body, and number every answer."""
    app.add_exception_handler(HTTPException, _from_framework)
    app.add_exception_handler(RequestValidationError, _from_validation)
    app.add_middleware(ErrorBoundary)


def error_response(error: H3Error, *, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that carries this error."""
    sent = dict(headers or {})
    if error.retry_after_s is not None:
        sent["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Unauthorized):
        sent["WWW-Authenticate"] = "Bearer"
    if isinstance(error, NotImplementedYet):
        sent["x-should-retry"] = "false"
    return JSONResponse(_sendable(error.body()), status_code=status or error.status, headers=sent)


class ErrorBoundary:
    """Innermost ASGI layer that sees every exception; nothing of a traceback leaves through it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; what it raises becomes an answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, request_id_of(scope))
        scope.setdefault("state", {})["request_id"] = answer.request_id
        with working_for(Errand(answer.request_id)):
            try:
                await self._app(scope, receive, answer.send)
            except Exception as error:
                if answer.started:
                    raise
                await _response_to(error, answer.request_id)(scope, receive, answer.send)


class _Answer:
    """Adds the request id, and turns the framework's plain-text errors into ours."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.started = False
        self._send = send
        self._replaced = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
            if message["status"] >= 400 and not _is_json(message):
                self._replaced = True
                await self._replace(message)
        if not self._replaced:
            await self._send(message)

    async def _replace(self, message: Message) -> None:
        status = message["status"]
        detail = _detail(
            status, "the request cannot be answered", "invalid_request" if status < 500 else "internal_error"
        )
        body = JSONResponse(_sendable(ErrorBody(error=detail))).body
        headers = MutableHeaders(scope=message)
        headers["content-type"], headers["content-length"] = "application/json", str(len(body))
        await self._send(message)
        await self._send({"type": "http.response.body", "body": body})


def _is_json(message: Message) -> bool:
    return Headers(raw=message["headers"]).get("content-type", "").startswith("application/json")


def _response_to(error: Exception, request_id: str) -> Response:
    match error:
        case RequestError():
            return error_response(error)
        case StoreUnavailable() | StorageUnavailable():
            _LOG.warning("request %s: %s", request_id, error.__cause__ or error)
            return error_response(error)
        case ClientDisconnect():
            # Nobody reads it; the server wants an answer all the same.
            return error_response(InvalidRequest("the client left before its body was read"))
        case _:
            _LOG.exception("request %s failed", request_id, exc_info=error)
            own = H3Error("an internal error; the server's log has it under the x-request-id of this answer")
            return error_response(own)


async def _from_framework(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    match status:
        case 404:
            return error_response(NotFound("there is no such route"), headers=headers)
        case 405:
            wrong = RequestError("this route does not take that method", code="method_not_allowed")
            return error_response(wrong, status=405, headers=headers)
        case _:
            detail = _detail(status, "the request cannot be read", "invalid_request")
            return JSONResponse(_sendable(ErrorBody(error=detail)), status_code=status, headers=headers)


async def _from_validation(_request: Request, _error: Exception) -> Response:
    return error_response(InvalidRequest("a parameter of the URL cannot be read"))


def _detail(status: int, message: str, code: str) -> ErrorDetail:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ErrorDetail(message=message, type=kind, code=code)


def _sendable(body: ErrorBody) -> dict[str, dict[str, str | None]]:
    """The body as JSON; half a surrogate pair of the caller's own text cannot be sent back as it came."""
    fields = body.error.model_dump()
    return {"error": {key: None if text is None else _printable(text) for key, text in fields.items()}}


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
