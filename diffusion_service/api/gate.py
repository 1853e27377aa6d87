"""The gate before every route: who calls, how often, and one audit line for what was done. Runs in the API process.

It looks at headers alone: whoever may not pass is answered before a byte of the body is read.
"""

import logging
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion_service.api.page import PAGE_PATHS
from diffusion_service.api.prefix import path_of
from diffusion_service.api.rates import RateLimiter
from diffusion_service.keys import EVERYONE, Caller, KeyRing
from diffusion_service.keys import Scope as KeyScope
from shared_schema.errors import Forbidden, H3Error, Unauthorized

AUDIT = logging.getLogger("diffusion_service.audit")
"""Who did what; ids and names of keys, never a prompt and never a file's name."""

OPEN_PATHS: Final = PAGE_PATHS | {
    "/livez",
    "/readyz",
    "/readyz/api",
    "/health",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/redoc",
}
"""Answered without a key; every other path asks for one."""
_READS = ("GET", "HEAD", "OPTIONS")
_DENIED = (401, 403, 429)


class Gate:
    """ASGI layer. Without a ring every request is everyone's, whatever its `Authorization` says."""

    def __init__(self, app: ASGIApp, ring: KeyRing | None, limiter: RateLimiter | None) -> None:
        self._app = app
        self._ring = ring
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or raise."""
        if scope["type"] != "http" or path_of(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return

        async def heard(message: Message) -> None:
            if message["type"] == "http.response.start":
                level = logging.DEBUG if scope["method"] in _READS else logging.INFO
                AUDIT.log(level, "%s status=%d", _line(scope), message["status"])
            await send(message)

        try:
            self._admit(scope)
            await self._app(scope, receive, heard)
        except H3Error as error:
            quiet = scope["method"] in _READS and error.status not in _DENIED
            AUDIT.log(logging.DEBUG if quiet else logging.INFO, "%s refused=%s", _line(scope), error.code)
            raise

    def _admit(self, scope: Scope) -> None:
        caller = self._caller(scope)
        scope.setdefault("state", {})["caller"] = caller
        if self._limiter is not None:
            self._limiter.take(_limited_as(caller, scope))

    def _caller(self, scope: Scope) -> Caller:
        if self._ring is None:
            return EVERYONE
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        caller = self._ring.find(key.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            raise Unauthorized("this server wants an API key: Authorization: Bearer <key>")
        return caller


def caller_of(request: Request, scope: KeyScope | None = None) -> Caller:
    """Who sends this request.

    Raises:
        Forbidden: the caller's key lacks `scope`.
    """
    caller = request.state.caller
    assert isinstance(caller, Caller)
    if scope is not None and not caller.may(scope):
        raise Forbidden(f"this key may not do that: it lacks the scope {scope}")
    return caller


def note_job(request: Request, job_id: str) -> None:
    """Name the job in this request's audit line."""
    request.state.job = job_id


def _limited_as(caller: Caller, scope: Scope) -> str:
    if caller.name is not None:
        return f"key {caller.name}"
    return f"address {_client(scope)}"


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "-"


def _line(scope: Scope) -> str:
    """Names of routes in place of paths, which are a caller's own words."""
    state, route = scope.get("state", {}), scope.get("route")
    caller = state.get("caller")
    who = caller.name if isinstance(caller, Caller) else None
    path = getattr(route, "path", "-")
    known = f"key={who or '-'} client={_client(scope)} request={state.get('request_id', '-')}"
    return f"{known} job={state.get('job', '-')} call={scope['method']}:{path}"
