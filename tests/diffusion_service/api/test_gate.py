"""Who may do what: keys, scopes, whose job it is, how often; and what the audit lines say and do not say."""

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffusion_service.api.layers import Access
from diffusion_service.api.rates import Rate, RateLimiter
from diffusion_service.keys import KeyRing, Scope, add_key
from tests.diffusion_service.api.served import LIMITS, Around, Served, error, part, serve

GOOD: dict[str, object] = {"prompt": "a red ball", "size": "64x64", "num_frames": 107}
OPEN = ("/livez", "/readyz", "/readyz/api", "/health", "/metrics", "/openapi.json")
GRANTED: dict[str, tuple[Scope, ...]] = {
    "ann": ("create", "read_own"),
    "bob": ("create", "read_own"),
    "maker": ("create",),
    "reader": ("read_own",),
    "auditor": ("read_all",),
    "root": ("admin",),
}


@dataclasses.dataclass
class Guarded:
    """An API with keys."""

    served: Served
    keys: dict[str, str]

    def as_(self, name: str) -> dict[str, str]:
        """The headers of that key."""
        return {"authorization": f"Bearer {self.keys[name]}"}

    async def call(self, name: str, method: str, path: str, **more: Any) -> httpx.Response:
        """A request with that key."""
        return await self.served.client.request(method, path, headers=self.as_(name), **more)

    async def make(self, name: str) -> str:
        """The id of a job of that key."""
        answer = await self.served.post(GOOD, **self.as_(name))
        return (await self.served.job(answer)).id


def guarded(
    folder: Path, body: Callable[[Guarded], Awaitable[None]], limiter: RateLimiter | None = None, **limits: Any
) -> None:
    file = folder / "keys.json"
    keys = {name: add_key(file, name, scopes) for name, scopes in GRANTED.items()}

    async def run(served: Served) -> None:
        await body(Guarded(served, keys))

    access = Access(ring=KeyRing(file), limiter=limiter)
    serve(folder / "state", run, dataclasses.replace(LIMITS, **limits), Around(access=access))


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic {key}", "{key}", "Bearer {key}x"])
def test_without_a_key_that_is_known_nothing_but_health_answers(tmp_path: Path, given: str | None) -> None:
    async def body(api: Guarded) -> None:
        headers = {} if given is None else {"authorization": given.format(key=api.keys["ann"])}
        for method, path in (("GET", "/v1/videos"), ("POST", "/v1/videos"), ("GET", "/v1/models"), ("GET", "/no")):
            answer = await api.served.client.request(method, path, headers=headers)
            assert error(answer, 401)["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in OPEN:
            assert (await api.served.client.get(path, headers=headers)).status_code == 200

    guarded(tmp_path, body)


def test_a_key_is_asked_for_before_the_body_is_read(tmp_path: Path) -> None:  # case 14
    async def body(api: Guarded) -> None:
        read: list[int] = []

        async def receive() -> dict[str, object]:
            read.append(1)
            return {"type": "http.request", "body": b"", "more_body": False}

        sent: list[dict[str, object]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        for name, status in ((None, 401), ("reader", 403)):
            raw = [(b"authorization", api.as_(name)["authorization"].encode())] if name else []
            scope = {"type": "http", "method": "POST", "path": "/v1/videos", "query_string": b"", "headers": raw}
            await api.served.app({**scope, "root_path": "", "http_version": "1.1"}, receive, send)
            assert sent[-2]["status"] == status
        assert read == []

    guarded(tmp_path, body)


@pytest.mark.parametrize("spelling", ["Bearer {}", "bearer {}", "BEARER  {} "])
def test_a_key_is_known_in_every_spelling_of_the_scheme(tmp_path: Path, spelling: str) -> None:
    async def body(api: Guarded) -> None:
        headers = {"authorization": spelling.format(api.keys["ann"])}
        assert (await api.served.client.get("/v1/videos", headers=headers)).status_code == 200

    guarded(tmp_path, body)


def test_without_configured_keys_any_authorization_passes(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        for given in ("Bearer any", "Basic eDp5", "nonsense"):
            assert (await served.post(GOOD, authorization=given)).status_code == 200

    serve(tmp_path, body)


def test_a_job_belongs_to_its_key(tmp_path: Path) -> None:
    async def body(api: Guarded) -> None:
        ann, bob = await api.make("ann"), await api.make("bob")
        stored = await api.served.store.get(ann)
        assert stored is not None
        assert stored.key == "ann"
        for name, seen in (
            ("ann", [ann]),
            ("bob", [bob]),
            ("reader", []),
            ("auditor", [bob, ann]),
            ("root", [bob, ann]),
        ):
            listed = (await api.call(name, "GET", "/v1/videos")).json()
            assert [video["id"] for video in listed["data"]] == seen
        assert error(await api.call("ann", "GET", f"/v1/videos?after={bob}"))["param"] == "after"
        for method, path in (("GET", ""), ("GET", "/content"), ("POST", "/cancel"), ("DELETE", "")):
            error(await api.call("bob", method, f"/v1/videos/{ann}{path}"), 404)
        assert (await api.call("auditor", "GET", f"/v1/videos/{ann}")).status_code == 200
        for method, path in (("POST", "/cancel"), ("DELETE", "")):
            assert (
                error(await api.call("auditor", method, f"/v1/videos/{ann}{path}"), 403)["code"] == "permission_denied"
            )
        assert (await api.call("ann", "POST", f"/v1/videos/{ann}/cancel")).status_code == 200
        assert (await api.call("root", "DELETE", f"/v1/videos/{ann}")).status_code == 200

    guarded(tmp_path, body)


def test_a_scope_that_is_missing_is_403(tmp_path: Path) -> None:
    async def body(api: Guarded) -> None:
        made = await api.make("maker")
        assert error(await api.call("maker", "GET", f"/v1/videos/{made}"), 403)["type"] == "permission_error"
        error(await api.call("maker", "GET", "/v1/videos"), 403)
        error(await api.call("reader", "POST", "/v1/videos", json=GOOD), 403)
        error(await api.call("auditor", "POST", "/v1/videos/sync", json=GOOD), 403)
        assert (await api.call("maker", "DELETE", f"/v1/videos/{made}")).status_code == 200

    guarded(tmp_path, body)


def test_a_key_with_enough_jobs_waits_and_the_others_do_not(tmp_path: Path, cases: Path) -> None:
    async def body(api: Guarded) -> None:
        first = await api.make("ann")
        answer = await api.served.post(GOOD, [part(cases / "ref1.png")], **api.as_("ann"))
        assert error(answer, 429)["code"] == "key_busy"
        assert int(answer.headers["retry-after"]) > 0
        assert api.served.files() == []
        await api.make("bob")
        await api.served.runner.cancel(first)
        await api.make("ann")

    guarded(tmp_path, body, jobs_per_key=1)


def test_requests_that_come_too_fast_are_429_each_key_for_itself(tmp_path: Path) -> None:
    now = 0.0

    async def body(api: Guarded) -> None:
        nonlocal now
        for name in ("ann", "bob"):
            assert (await api.call(name, "GET", "/v1/models")).status_code == 200
            assert (await api.call(name, "GET", "/v1/models")).status_code == 200
            answer = await api.call(name, "GET", "/v1/models")
            assert error(answer, 429)["code"] == "rate_limited"
            assert answer.headers["retry-after"] == "2"
        assert (await api.served.client.get("/livez")).status_code == 200
        now = 2.0
        assert (await api.call("ann", "GET", "/v1/models")).status_code == 200

    guarded(tmp_path, body, RateLimiter(Rate(30, 2), lambda: now))


def test_audit_lines_say_who_did_what_and_nothing_of_the_request(
    tmp_path: Path, cases: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(api: Guarded) -> None:
        secret = {**GOOD, "prompt": "PROMPT-SECRET", "user": "USER-SECRET"}
        picture = part(cases / "ref1.png", file_name="FILE-SECRET.png")
        made = (await api.served.post(secret, [picture], **api.as_("ann"))).json()["id"]
        await api.call("ann", "GET", f"/v1/videos/{made}")
        await api.call("ann", "DELETE", f"/v1/videos/{made}")
        await api.served.post({**secret, "seconds": "PROMPT-SECRET"}, [picture], **api.as_("ann"))
        await api.served.client.post("/v1/PROMPT-SECRET", headers={"authorization": "Bearer KEY-SECRET"})
        lines = [record.getMessage() for record in caplog.records if record.name == "diffusion_service.audit"]
        assert [line.split(" request=")[0] for line in lines] == [
            *["key=ann client=127.0.0.1"] * 3,
            "key=- client=127.0.0.1",
        ]
        assert [line.split(" job=")[1] for line in lines] == [
            f"{made} call=POST:/v1/videos status=200",
            f"{made} call=DELETE:/v1/videos/{{video_id}} status=200",
            "- call=POST:/v1/videos refused=invalid_request",
            "- call=POST:- refused=invalid_api_key",
        ]

    with caplog.at_level(logging.INFO, "diffusion_service"):
        guarded(tmp_path, body)
    assert "SECRET" not in caplog.text
    for key in ("h3_", "Bearer"):
        assert key not in caplog.text


def test_audit_lines_carry_the_request_id_of_the_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(served: Served) -> None:
        with caplog.at_level(logging.INFO, "diffusion_service"):
            answer = await served.post(GOOD)
        assert f"request={answer.headers['x-request-id']} " in caplog.text

    serve(tmp_path, body)
