"""The encoder's internal HTTP API towards strangers: the token, and bodies that are no JSON."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from encoder_service.accounts import EncodeAccounts
from encoder_service.encoder import Encoder
from encoder_service.routes import EncoderDeps, build_app
from shared_runtime.spans_out import NoSink
from shared_runtime.transport.accounts import TransportAccounts
from shared_schema.encode import SCHEMA_VERSION, EncoderIdentity
from tests.encoder_service.test_encoder import HeldGroup

ROUTES = (
    ("GET", "/v1/identity"),
    ("POST", "/v1/encodings"),
    ("POST", "/v1/encodings/x/push"),
    ("POST", "/v1/encodings/x/lease"),
    ("DELETE", "/v1/encodings/x"),
    ("POST", "/v1/probes"),
    ("POST", "/v1/tokens"),
)


def ask(token: str | None, body: Callable[[httpx.AsyncClient, HeldGroup], Awaitable[None]]) -> None:
    """Run `body` against an encoder whose shared token is `token`."""

    async def run() -> None:
        group = HeldGroup()
        registry = CollectorRegistry()
        accounts, encodes = TransportAccounts(registry), EncodeAccounts(registry)
        encoder = Encoder(group, endpoint="http://e", lease_s=10, accounts=accounts, encodes=encodes)
        identity = EncoderIdentity(
            schema_version=SCHEMA_VERSION,
            instance_id=encoder.instance_id,
            model="tiny",
            weights_revision="r",
            text_only=False,
            connector="SharedMemoryConnector",
        )
        app = build_app(EncoderDeps(encoder, identity, token, registry, NoSink().export))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://e") as client:
            await body(client, group)

    asyncio.run(run())


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer ", "Bearer s\u00e9same"])
def test_nothing_is_done_for_a_caller_without_the_token(given: str | None) -> None:  # case 44
    async def body(client: httpx.AsyncClient, group: HeldGroup) -> None:
        headers = {} if given is None else {"authorization": given.encode()}
        for method, path in ROUTES:
            answer = await client.request(method, path, headers=headers, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_token"), path
        assert group.asked == []
        for path in ("/livez", "/health", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200

    ask("sesame", body)


def test_a_caller_without_the_token_is_answered_before_its_body_is_read() -> None:
    # FastAPI reads a body before it asks a dependency: a stranger could have filled the memory.
    async def body(client: httpx.AsyncClient, _group: HeldGroup) -> None:
        taken = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal taken
            while taken < 1000:
                taken += 1
                yield b" " * 1024

        for path in ("/v1/probes", "/v1/tokens", "/v1/encodings", "/v1/encodings/x/push"):
            answer = await client.post(path, content=endless(), headers={"content-type": "application/json"})
            assert answer.status_code == 401, path
        assert taken == 0

    ask("sesame", body)


def test_the_token_opens_everything_and_without_one_nothing_is_asked() -> None:
    async def body(client: httpx.AsyncClient, group: HeldGroup) -> None:
        answer = await client.get("/v1/identity", headers={"authorization": "Bearer sesame"})
        assert answer.json()["model"] == "tiny"

    ask("sesame", body)
    ask(None, body)


class Pwn:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path) -> None:  # case 44
    async def body(client: httpx.AsyncClient, group: HeldGroup) -> None:
        for method, path in ROUTES[1:]:
            for kind in ("application/json", "application/octet-stream", "multipart/form-data; boundary=x"):
                sent = pickle.dumps(Pwn(tmp_path / "pwned"))
                answer = await client.request(method, path, content=sent, headers={"content-type": kind})
                assert answer.status_code < 500, (path, kind, answer.text)
        assert not (tmp_path / "pwned").exists()
        assert (await client.get("/health")).status_code == 200

    ask(None, body)


@pytest.mark.parametrize("size", [0, -1, 64 * 2**20 + 1, 2**40])
def test_a_probe_of_an_impossible_size_reaches_no_rank(size: int) -> None:  # case 44
    async def body(client: httpx.AsyncClient, group: HeldGroup) -> None:
        answer = await client.post("/v1/probes", json={"landing": {"kind": "inline"}, "bytes": size})
        assert 400 <= answer.status_code < 500
        assert group.asked == []

    ask(None, body)


def test_a_caller_that_leaves_during_an_upload_is_no_fault_of_the_encoder() -> None:
    async def body(client: httpx.AsyncClient, _group: HeldGroup) -> None:
        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        sent: list[dict[str, object]] = []
        messages = iter([{"type": "http.request", "body": b"--x\r\n", "more_body": True}, {"type": "http.disconnect"}])

        async def receive() -> dict[str, object]:
            return next(messages)

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/encodings",
            "raw_path": b"/v1/encodings",
            "query_string": b"",
            "headers": [(b"content-type", b"multipart/form-data; boundary=x"), (b"authorization", b"Bearer t")],
            "http_version": "1.1",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "server": ("e", 80),
        }
        await transport.app(scope, receive, send)  # type: ignore[arg-type]
        assert sent[0]["status"] == 400

    ask("t", body)
