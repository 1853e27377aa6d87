"""Every answer that is no success has the same body, and every answer a request id."""

import asyncio
import logging
from pathlib import Path
from typing import get_args

import pytest
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Message

from diffusion_service.api.errors import JOB_HTTP_STATUS, ErrorBoundary
from shared_schema.errors import InvalidRequest, JobErrorCode, JobFailed
from tests.diffusion_service.api.served import Served, error, serve


def test_every_job_code_has_its_status() -> None:
    assert set(JOB_HTTP_STATUS) == set(get_args(JobErrorCode))
    assert JobFailed("no", code="timeout").code == "timeout"


def test_unknown_routes_and_methods(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        for path in ("/v1/nothing", "/v1/videos/video_unknown", "/nothing"):
            assert error(await served.client.get(path), 404)["type"] == "invalid_request_error"
        wrong = await served.client.put("/v1/videos")
        assert error(wrong, 405)["code"] == "method_not_allowed"
        assert "allow" in wrong.headers

    serve(tmp_path, body)


def test_a_request_id_is_kept_if_it_can_be(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        for given, kept in (("abc-1.2:3", True), ("a" * 129, False), ("a b", False), ("", False)):
            answer = await served.client.get("/livez", headers={"x-request-id": given})
            assert (answer.headers["x-request-id"] == given) is kept

    serve(tmp_path, body)


def test_a_fault_of_ours_is_a_500_that_tells_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(served: Served) -> None:
        @served.app.get("/broken")
        async def broken() -> Response:
            raise RuntimeError("secret")

        answer = await served.client.get("/broken", headers={"x-request-id": "mine"})
        assert error(answer, 500)["code"] == "internal_error"
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"] == "mine"

    with caplog.at_level(logging.ERROR):
        serve(tmp_path, body)
    (record,) = caplog.records
    assert "mine" in record.getMessage()
    assert record.exc_info


def test_a_plain_text_error_becomes_ours(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        @served.app.get("/plain")
        async def plain() -> Response:
            return PlainTextResponse("no", 418, headers={"x-kept": "1"})

        answer = await served.client.get("/plain")
        assert error(answer, 418)["type"] == "invalid_request_error"
        assert answer.headers["x-kept"] == "1"

    serve(tmp_path, body)


def test_an_answer_that_breaks_off_stays_broken(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        async def half() -> object:
            yield b"half"
            raise RuntimeError

        @served.app.get("/half")
        async def answer() -> Response:
            return StreamingResponse(half())  # type: ignore[arg-type]

        with pytest.raises(RuntimeError):
            await served.client.get("/half")

    serve(tmp_path, body)


def test_a_client_that_left_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:  # case 6
    sent: list[Message] = []

    async def app(*_: object) -> None:
        raise ClientDisconnect

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    asyncio.run(ErrorBoundary(app)({"type": "http", "headers": []}, receive, send))
    assert sent[0]["status"] == 400
    assert caplog.records == []


def test_text_that_cannot_be_sent_is_escaped(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        @served.app.get("/half")
        async def half() -> Response:
            raise InvalidRequest("half \ud800", param="\udfff")

        assert error(await served.client.get("/half"))["param"] == "\\udfff"

    serve(tmp_path, body)


def test_other_scopes_pass() -> None:
    seen: list[str] = []

    async def app(scope: dict[str, str], *_: object) -> None:
        seen.append(scope["type"])

    asyncio.run(ErrorBoundary(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
