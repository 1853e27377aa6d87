"""Counts what a service answers over HTTP, as Prometheus metrics. An ASGI layer of both API processes; no torch.

Labels come from closed sets: templates of routes in place of paths, known methods, status codes, error codes of ours.
"""

import json
import time
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared_schema.errors import H3Error, JobErrorCode

OTHER = "other"
"""Stands for every label value that is no member of its set."""
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_NAMED_AT_USE = frozenset({"method_not_allowed", "invalid_request"})
"""Codes that no class of the tree has as its default."""
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60, 600)
_LONGEST_ERROR = 1 << 16


class AnswerAccounts:
    """Answers of one service by route, and its refusals by error code."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._codes = _known_codes(H3Error) | {*get_args(JobErrorCode)} | _NAMED_AT_USE
        self._answers = Counter(
            "h3_requests", "HTTP requests that were answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "h3_request_seconds",
            "From a request to the head of its answer.",
            ["method", "route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._refusals = Counter("h3_rejections", "Answers that are errors, by code.", ["code"], registry=registry)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """The head of an answer was sent; `route` is a template, or `OTHER`."""
        known = method if method in _METHODS else OTHER
        self._answers.labels(known, route, str(status)).inc()
        self._seconds.labels(known, route).observe(seconds)

    def refused(self, code: object) -> None:
        """An answer was an error body with this code."""
        self._refusals.labels(code if isinstance(code, str) and code in self._codes else OTHER).inc()


class CountAnswers:
    """ASGI layer around everything whose answers count."""

    def __init__(self, app: ASGIApp, accounts: AnswerAccounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app and count its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 0
        body: bytes | None = None

        async def heard(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
                body = b"" if status >= 400 else None
                self._accounts.answered(scope["method"], _route(scope), status, time.perf_counter() - begun)
            elif body is not None and len(body) < _LONGEST_ERROR:
                body += message.get("body", b"")
            await send(message)

        try:
            await self._app(scope, receive, heard)
        except BaseException:
            if not status:
                # The server answers for whoever raised, outside of this layer.
                self._accounts.answered(scope["method"], _route(scope), 500, time.perf_counter() - begun)
                self._accounts.refused(H3Error.default_code)
            raise
        finally:
            if body is not None:
                self._accounts.refused(_code(body))


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", OTHER)


def _code(body: bytes) -> object:
    """The code of an error body of ours; None for anything else."""
    try:
        return json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None


def _known_codes(kind: type[H3Error]) -> frozenset[str]:
    return frozenset({kind.default_code}).union(*(_known_codes(each) for each in kind.__subclasses__()))
