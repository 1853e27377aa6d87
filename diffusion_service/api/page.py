"""The web page: plain files of this package, answered from memory. Runs in the API process.

It asks nobody but this server, and its policy lets it do nothing else: no inline script or style, no foreign address,
no text that becomes markup.
"""

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

INDEX: Final = "index.html"
SCRIPTS: Final = (
    "api.js",
    "app.js",
    "clip.js",
    "compose.js",
    "dom.js",
    "fields.js",
    "history.js",
    "icons.js",
    "media.js",
    "progress.js",
    "references.js",
    "request.js",
    "rules.js",
    "settings.js",
)
ASSETS: Final[dict[str, str]] = {
    "icon.svg": "image/svg+xml",
    "style.css": "text/css; charset=utf-8",
    "parts.css": "text/css; charset=utf-8",
    **dict.fromkeys(SCRIPTS, "text/javascript; charset=utf-8"),
}
PAGE_PATHS: Final = frozenset({"/", *(f"/page/{name}" for name in ASSETS)})
"""Answered without a key: they hold nothing of anybody's."""
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class _File:
    """One file of the page, read once."""

    def __init__(self, name: str, media_type: str, headers: dict[str, str]) -> None:
        self._body = (files("diffusion_service") / "page" / name).read_bytes()
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._media_type = media_type
        # A browser asks each time whether it still has the newest: all files of one version go together.
        self._headers = {"etag": self._tag, "cache-control": "no-cache", **headers}

    def answer(self, request: Request) -> Response:
        """The file, or 304 to a browser that has it."""
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, media_type=self._media_type, headers=self._headers)


def page_router() -> APIRouter:
    """`/` and what it loads."""
    router = APIRouter(include_in_schema=False)
    index = _File(INDEX, "text/html; charset=utf-8", _PAGE_HEADERS)
    router.add_api_route("/", _answering(index), methods=["GET", "HEAD"])
    for name, media_type in ASSETS.items():
        router.add_api_route(f"/page/{name}", _answering(_File(name, media_type, {})), methods=["GET", "HEAD"])
    return router


def _answering(file: _File) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return file.answer(request)

    return answer
