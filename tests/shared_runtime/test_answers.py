"""Answers are counted by what callers cannot make up: templates of routes, known methods and codes."""

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, Response

from shared_runtime.answers import AnswerAccounts, CountAnswers
from shared_runtime.metrics import exposition
from shared_schema.errors import QueueFull


def _app(registry: CollectorRegistry) -> FastAPI:
    app = FastAPI()
    app.add_middleware(CountAnswers, accounts=AnswerAccounts(registry))

    @app.get("/v1/videos/{video_id}")
    async def get(video_id: str) -> Response:
        if video_id == "broken":
            raise RuntimeError(video_id)
        code = video_id if video_id.startswith("x") else QueueFull.default_code
        return JSONResponse({"error": {"code": code}}, status_code=429) if video_id != "good" else Response(b"{}")

    return app


def _after(*requests: tuple[str, str]) -> str:
    registry = CollectorRegistry()

    async def ask() -> None:
        transport = httpx.ASGITransport(app=_app(registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://h3") as client:
            for method, path in requests:
                if path.endswith("broken"):
                    with pytest.raises(RuntimeError):
                        await client.request(method, path)
                else:
                    await client.request(method, path)

    asyncio.run(ask())
    return exposition(registry).decode()


def test_paths_and_methods_of_callers_make_no_labels() -> None:
    seen = _after(("GET", "/v1/videos/good"), ("GET", "/v1/videos/secret"), ("PURGE", "/a"), ("BREW", "/b"))
    assert 'h3_requests_total{method="GET",route="/v1/videos/{video_id}",status="200"} 1.0' in seen
    assert 'h3_requests_total{method="other",route="other",status="404"} 2.0' in seen
    assert "secret" not in seen


def test_refusals_are_counted_by_codes_of_ours_alone() -> None:
    seen = _after(("GET", "/v1/videos/full"), ("GET", "/v1/videos/x1"), ("GET", "/v1/videos/x2"), ("GET", "/none"))
    assert 'h3_rejections_total{code="queue_full"} 1.0' in seen
    assert 'h3_rejections_total{code="other"} 3.0' in seen


def test_a_fault_that_nobody_caught_is_a_500() -> None:
    seen = _after(("GET", "/v1/videos/broken"))
    assert 'route="/v1/videos/{video_id}",status="500"} 1.0' in seen
    assert 'h3_rejections_total{code="internal_error"} 1.0' in seen


def test_a_body_in_pieces_is_read_whole() -> None:
    registry = CollectorRegistry()
    body = json.dumps({"error": {"code": "queue_full"}}).encode()

    async def app(_scope: object, _receive: object, send) -> None:  # type: ignore[no-untyped-def]
        await send({"type": "http.response.start", "status": 429, "headers": []})
        for piece in (body[:7], body[7:]):
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def play() -> None:
        async def send(_message: object) -> None:
            pass

        layer = CountAnswers(app, AnswerAccounts(registry))
        await layer({"type": "http", "method": "GET"}, None, send)  # type: ignore[arg-type]

    asyncio.run(play())
    assert 'h3_rejections_total{code="queue_full"} 1.0' in exposition(registry).decode()
