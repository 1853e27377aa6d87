"""The diffusion service's side of the encoder's HTTP API: calls and errors. Runs in its API process."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from shared_runtime.tracing import adopt, errand
from shared_schema.encode import (
    EncodeProgress,
    EncodeRequest,
    EncoderIdentity,
    Encoding,
    Landing,
    ProbeRequest,
    PushReceipt,
    PushRequest,
    TokensAnswer,
)
from shared_schema.errors import (
    EncoderAway,
    ErrorBody,
    ErrorDetail,
    H3Error,
    InvalidRequest,
    JobErrorCode,
    JobFailed,
    LeaseExpired,
    NotReady,
    RankDied,
    TransportError,
)
from shared_schema.health import Health
from shared_schema.trace import TRACEPARENT

Shape = TypeVar("Shape", bound=BaseModel)

CONNECT_S = 5.0
SHORT_S = 10.0
"""For calls that only look something up."""


_KINDS: dict[str, type[H3Error]] = {
    "invalid_request": InvalidRequest,
    "not_ready": NotReady,
    "worker_died": RankDied,
    "transfer_failed": TransportError,
}
"""Error codes of the encoder whose type the caller acts on."""


class EncoderClient:
    """One encoder service behind one URL, or several behind a balancer."""

    def __init__(self, url: str, *, token: str | None, encode_timeout_s: float) -> None:
        self.url = url
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(SHORT_S, connect=CONNECT_S)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False)
        self._slow = httpx.Timeout(encode_timeout_s, connect=CONNECT_S)

    async def identity(self) -> EncoderIdentity:
        """Who answers at this URL.

        Raises:
            EncoderAway: nobody, or nobody who speaks this API.
        """
        return await self._ask(EncoderIdentity, "GET", f"{self.url}/v1/identity")

    async def health(self) -> Health:
        """How its ranks are; answers also while they are not ready."""
        with _mapped():
            response = await self._http.get(f"{self.url}/health")
            return Health.model_validate_json(response.content)

    async def encode(self, request: EncodeRequest, files: tuple[Path, ...]) -> Encoding:
        """Have a request encoded; closing the connection cancels it there.

        Raises:
            InvalidRequest: a file cannot be decoded after all.
            NotReady, EncoderAway: it has not begun.
            RankDied: its ranks, or the whole service, ended over it.
            JobFailed: it failed with that job error code.
        """
        with ExitStack() as opened:
            parts = [("file", (path.name, opened.enter_context(path.open("rb")))) for path in files]
            fields = {"request": request.model_dump_json()}
            url = f"{self.url}/v1/encodings"
            form: list[tuple[str, tuple[str, object]]] = list(parts)
            files_or_none = form or [("", ("", b""))]
            made = await self._ask(Encoding, "POST", url, data=fields, files=files_or_none, timeout=self._slow)
        adopt(made.spans)
        return made

    async def push(self, encoding: Encoding, landing: Landing) -> PushReceipt:
        """Have an encoding pushed into `landing`.

        Raises:
            LeaseExpired: it is not there any more, or the landing's lease ended first.
            TransportError: it could not be written; another try may do.
        """
        url = f"{encoding.endpoint}/v1/encodings/{encoding.id}/push"
        body = PushRequest(landing=landing).model_dump()
        receipt = await self._ask(PushReceipt, "POST", url, json=body, timeout=self._slow)
        adopt(receipt.spans)
        return receipt

    async def renew(self, encoding: Encoding) -> None:
        """Another lease for an encoding that still waits for room."""
        await self._call("POST", f"{encoding.endpoint}/v1/encodings/{encoding.id}/lease")

    async def drop(self, encoding: Encoding) -> None:
        """Forget an encoding that nobody will push."""
        await self._call("DELETE", f"{encoding.endpoint}/v1/encodings/{encoding.id}")

    async def count_tokens(self, prompt: str) -> int:
        """Tokens of a prompt as the text encoder would read it."""
        return (await self._ask(TokensAnswer, "POST", f"{self.url}/v1/tokens", json={"prompt": prompt})).tokens

    async def probe(self, landing: Landing, nbytes: int) -> PushReceipt:
        """Have `nbytes` of a pattern pushed into `landing`."""
        body = ProbeRequest(landing=landing, bytes=nbytes).model_dump()
        return await self._ask(PushReceipt, "POST", f"{self.url}/v1/probes", json=body, timeout=self._slow)

    async def progress(self, request_id: str) -> EncodeProgress:
        """How far the encoding of a request is.

        Raises:
            H3Error: it is not under way there, or nobody answers.
        """
        return await self._ask(EncodeProgress, "GET", f"{self.url}/v1/encodings/{request_id}/progress")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _ask(self, shape: type[Shape], method: str, url: str, **arguments: object) -> Shape:
        body = await self._call(method, url, **arguments)
        with _mapped():
            return shape.model_validate_json(body)

    async def _call(self, method: str, url: str, **arguments: object) -> bytes:
        with _mapped():
            response = await self._http.request(method, url, headers=_errand_headers(), **arguments)  # type: ignore[arg-type]
            if response.is_success:
                return response.content
            error = _error_of(response)
        if error.code == LeaseExpired.default_code:
            raise LeaseExpired(error.message, slot=error.param)
        kind = _KINDS.get(error.code or "")
        if kind is not None:
            raise kind(error.message, param=error.param, code=error.code)
        match error.code:
            case "out_of_memory" | "numerical_error" | "timeout":
                raise JobFailed(error.message, code=error.code)
            case _:
                raise JobFailed(f"the encoder failed: {error.message}", code="internal_error")


_NOBODY_THERE = (404, 429, 502, 503)
"""A proxy's own answers while the encoder behind it starts anew."""


def _errand_headers() -> dict[str, str]:
    """What the encoder's log lines and spans are to be known by."""
    now = errand()
    if now is None:
        return {}
    named = {"x-request-id": now.request_id}
    return named if now.parent is None else {**named, TRACEPARENT: now.parent.header()}


def _error_of(response: httpx.Response) -> ErrorDetail:
    """What an encoder says is wrong.

    Raises:
        EncoderAway: a proxy answered in its place, that it is not there.
        JobFailed: a proxy does not let this request through, or did not wait; it would not do so again either.
    """
    try:
        return ErrorBody.model_validate_json(response.content).error
    except ValidationError as error:
        status = response.status_code
        if status in _NOBODY_THERE:
            raise EncoderAway(f"the encoder does not answer: its URL answers {status}") from error
        code: JobErrorCode = "timeout" if status == 504 else "encoder_unavailable"
        raise JobFailed(f"what is before the encoder answers {status} in its place", code=code) from error


@contextmanager
def _mapped() -> Iterator[None]:
    """Every way in which the other end can fail to answer; whether it had begun is what the caller acts on."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise EncoderAway(f"the encoder does not answer: {error}") from error
    except httpx.TimeoutException as error:
        raise JobFailed("the encoder did not answer in time", code="timeout") from error
    except httpx.HTTPError as error:
        raise RankDied(f"the encoder went away while it worked: {error}") from error
    except ValidationError as error:
        raise JobFailed(
            "what answers at the encoder's URL is not an encoder of this version", code="encoder_unavailable"
        ) from error
