"""The gate before the encoder's own routes: the token that both services share. Runs in the API process.

It looks at headers alone: whoever may not pass is answered before a byte of the body is read.
"""

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from shared_schema.errors import RequestError


class TokenGate:
    """ASGI layer. What lies under `/v1` wants the token, if there is one; health and metrics do not."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer it."""
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError("this service needs the internal token that its peers share", code="invalid_token")
        answer = JSONResponse(error.body().model_dump(), status_code=401)
        await answer(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
        return self._token is None or hmac.compare_digest(given.encode(), self._token.encode())
