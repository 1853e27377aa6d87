"""Which request an API process works for, from its caller's headers. ASGI layer of the encoder service; no torch."""

import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shared_runtime.spans_out import Export
from shared_runtime.tracing import Errand, Recorder, working_for
from shared_schema.trace import TRACEPARENT, TraceParent

REQUEST_ID = "x-request-id"
_FORM = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(scope: Scope) -> str:
    """The caller's own, or a new one."""
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _FORM.fullmatch(given) else secrets.token_hex(16)


class Errands:
    """Everything inside works for the caller's request, and is measured where the caller sends a `traceparent`."""

    def __init__(self, app: ASGIApp, process: str, export: Export) -> None:
        self._app = app
        self._process = process
        self._export = export

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for that errand."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parent = TraceParent.read(Headers(scope=scope).get(TRACEPARENT, ""))
        recorder = None if parent is None else Recorder(self._process)
        try:
            with working_for(Errand(request_id_of(scope), parent), recorder):
                await self._app(scope, receive, send)
        finally:
            if parent is not None and recorder is not None and recorder.spans:
                self._export(parent.trace, recorder.spans)
