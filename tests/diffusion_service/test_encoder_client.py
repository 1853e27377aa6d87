"""Errors of an encoder keep their type on the way to the diffusion service."""

import asyncio

import pytest

from diffusion_service.encoder_client import EncoderClient
from shared_schema.encode import ShmLanding
from shared_schema.errors import (
    EncoderAway,
    H3Error,
    InvalidRequest,
    JobFailed,
    LeaseExpired,
    NotReady,
    RankDied,
    TransportError,
)

LANDING = ShmLanding(path="/dev/shm/x", offset=0, length=1, generation=1, request_id="0" * 32, deadline=1.0)


def answered(status: int, body: bytes) -> H3Error:
    """What a probe raises when an encoder gives this answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body)
        writer.close()

    async def ask() -> H3Error:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = EncoderClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token=None, encode_timeout_s=5)
        try:
            with pytest.raises(H3Error) as raised:
                await client.probe(LANDING, 1)
        finally:
            await client.close()
            server.close()
        return raised.value

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "error", [InvalidRequest("x"), LeaseExpired("x"), NotReady("x"), RankDied("x"), TransportError("x")], ids=type
)
def test_an_error_that_is_acted_on_keeps_its_type(error: H3Error) -> None:
    # A lease that ended during the first probe after a start took the whole diffusion service down.
    found = answered(error.status, error.body().model_dump_json().encode())
    assert type(found) is type(error)
    assert (found.message, found.param, found.code) == ("x", error.param, error.code)


def test_any_other_error_fails_the_job() -> None:
    assert type(answered(500, H3Error("x").body().model_dump_json().encode())) is JobFailed


@pytest.mark.parametrize("status", [404, 429, 502, 503])
def test_what_is_no_error_of_an_encoder_is_an_encoder_that_is_away(status: int) -> None:
    assert type(answered(status, b"<html>")) is EncoderAway


@pytest.mark.parametrize(
    ("status", "code"), [(413, "encoder_unavailable"), (400, "encoder_unavailable"), (504, "timeout")]
)
def test_a_request_that_a_proxy_does_not_let_through_fails_its_job(status: int, code: str) -> None:
    # As one that is away it was sent again for two hours, and held up every other job.
    found = answered(status, b"<html>")
    assert isinstance(found, JobFailed)
    assert found.code == code
