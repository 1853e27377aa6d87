"""What lies around every answer: security headers, CORS, the prefix of a proxy; and the disk watermark."""

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diffusion_service.api.disk import DiskGuard
from diffusion_service.api.layers import Access
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.keys import KeyRing, add_key
from shared_schema.errors import NotReady
from tests.diffusion_service.api.served import Around, Served, error, part, serve

GOOD: dict[str, object] = {"prompt": "a red ball", "size": "64x64", "num_frames": 107}
STUDIO = "https://studio.test"


def test_every_answer_carries_security_headers(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        for answer in (
            await served.post(GOOD),
            await served.client.get("/v1/videos/none"),
            await served.client.get("/livez"),
            await served.client.put("/v1/videos"),
        ):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert answer.headers["cache-control"] == "no-store"
        page = await served.client.get("/docs")
        assert page.headers["content-security-policy"].startswith("frame-ancestors 'none'")

    serve(tmp_path, body)


def test_without_listed_origins_no_page_may_read_an_answer(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        answer = await served.client.get("/v1/models", headers={"origin": STUDIO})
        assert "access-control-allow-origin" not in answer.headers
        preflight = {"origin": STUDIO, "access-control-request-method": "POST"}
        error(await served.client.options("/v1/videos", headers=preflight), 405)

    serve(tmp_path, body)


def test_a_listed_origin_asks_first_without_a_key_and_reads_errors_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "page", ("create",))

    async def body(served: Served) -> None:
        preflight = {
            "origin": STUDIO,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,idempotency-key",
        }
        allowed = await served.client.options("/v1/videos", headers=preflight)
        assert allowed.status_code == 200
        assert "idempotency-key" in allowed.headers["access-control-allow-headers"]
        refused = await served.client.options("/v1/videos", headers={**preflight, "origin": "https://evil.test"})
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
        for headers, status in (({}, 401), ({"authorization": f"Bearer {key}"}, 200)):
            answer = await served.client.post("/v1/videos", json=GOOD, headers={"origin": STUDIO, **headers})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, STUDIO)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]

    serve(tmp_path / "state", body, around=Around(access=Access(ring=KeyRing(file), origins=(STUDIO,))))


def test_a_prefix_is_served_stripped_or_not_and_needs_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "a", ("admin",))

    async def body(served: Served) -> None:
        headers = {"authorization": f"Bearer {key}"}
        for prefix in ("", "/h3"):
            assert (await served.client.get(f"{prefix}/livez")).status_code == 200
            assert (await served.client.get(f"{prefix}/v1/videos", headers=headers)).status_code == 200
            error(await served.client.get(f"{prefix}/v1/videos"), 401)
        assert (await served.client.get("/h3/openapi.json")).json()["servers"] == [{"url": "/h3"}]
        for path in ("/h3/h3/livez", "/h3livez", "/livez/", "/h3//livez", "/h3//v1/videos"):
            error(await served.client.get(path), 401)

    serve(tmp_path / "state", body, around=Around(access=Access(ring=KeyRing(file), prefix="/h3")))


def test_below_the_watermark_nothing_is_taken_in(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served) -> None:
        answer = await served.post(GOOD, [part(cases / "ref1.png")])
        assert error(answer, 503)["code"] == "disk_full"
        assert int(answer.headers["retry-after"]) > 0
        assert (served.files(), await served.store.ids()) == ([], frozenset())
        assert (await served.client.get("/v1/videos")).status_code == 200

    serve(tmp_path, body, around=Around(min_free_bytes=2**60))


@pytest.mark.parametrize("place", ["open_upload", "claim"])
def test_a_disk_that_is_full_is_said_wherever_it_is_met(
    tmp_path: Path, cases: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    async def body(served: Served) -> None:
        monkeypatch.setattr(Artifacts, place, full)
        answer = await served.post(GOOD, [part(cases / "ref1.png")])
        assert error(answer, 503)["code"] == "disk_full"

    serve(tmp_path, body)


def test_a_body_that_would_not_fit_is_turned_away_before_and_while_it_comes(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="input_reference"; filename="a"\r\n\r\n'
        while True:
            yield bytes(2**20)

    async def body(served: Served) -> None:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        announced = {**headers, "content-length": str(2**49)}
        assert error(await served.client.post("/v1/videos", content=b"", headers=announced), 503)["code"] == "disk_full"
        checks: list[int] = []

        def check(more: int = 0) -> None:
            checks.append(more)
            if sum(checks) > 3 * 2**20:
                raise NotReady("full")

        served.disk.check = check  # type: ignore[method-assign]
        error(await served.client.post("/v1/videos", content=endless(), headers=headers), 503)
        assert 3 * 2**20 < sum(checks) < 6 * 2**20

    serve(tmp_path, body)


@pytest.mark.parametrize(("more", "fits"), [(0, True), (2**60, False)])
def test_the_guard_asks_the_file_system(tmp_path: Path, more: int, fits: bool) -> None:
    guard = DiskGuard(tmp_path, 1)
    if fits:
        guard.check(more)
    else:
        with pytest.raises(NotReady):
            guard.check(more)
