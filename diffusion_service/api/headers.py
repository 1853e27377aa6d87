"""Headers that every answer carries: what a browser may make of it. Runs in the API process."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}
_PAGE_POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
_DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"


class SecurityHeaders:
    """ASGI layer; what an answer says itself stays."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app and add to its headers."""

        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add(MutableHeaders(scope=message))
            await send(message)

        await self._app(scope, receive, adding if scope["type"] == "http" else send)


def _add(headers: MutableHeaders) -> None:
    kind = headers.get("content-type", "")
    for name, value in _ALWAYS.items():
        headers.setdefault(name, value)
    headers.setdefault("content-security-policy", _PAGE_POLICY if kind.startswith("text/html") else _DATA_POLICY)
    if kind.startswith("application/json"):
        # Jobs change, and belong to whom they belong to.
        headers.setdefault("cache-control", "no-store")
