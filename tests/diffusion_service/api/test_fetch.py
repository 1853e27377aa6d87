"""Media by URL at POST: from listed hosts into the job's inputs, or a 400 that leaves nothing."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from diffusion_service.api.limits import ServerLimits
from shared_schema.deploy.service import AllowedHost
from tests.diffusion_service.api.served import LIMITS, Around, Served, error, serve
from tests.diffusion_service.listening import Listening, listening, moved, ok

GOOD: dict[str, object] = {"prompt": "a red ball", "size": "64x64", "num_frames": 107}
HOSTS = (AllowedHost(host="127.0.0.1", private=True), AllowedHost(host="localhost"))
LOCAL, SOON = Around(media_hosts=HOSTS), Around(media_hosts=HOSTS, fetch_s=1)


def fetching(
    folder: Path,
    body: Callable[[Served, Listening, str], Awaitable[None]],
    limits: ServerLimits = LIMITS,
    around: Around = LOCAL,
) -> None:
    async def run(served: Served) -> None:
        async with listening() as server:
            await body(served, server, f"http://127.0.0.1:{server.port}")

    serve(folder, run, limits, around)


def test_media_from_a_listed_host_are_the_jobs_inputs(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served, server: Listening, base: str) -> None:
        names = ("ref1.png", "aud_stereo_32k.wav", "vid_24fps.mp4")
        for name in names:
            server.answers[f"/{name}"] = ok((cases / name).read_bytes())
        server.answers["/moved"] = moved("/ref1.png")
        request = {
            **GOOD,
            "input_reference": {"image_url": f"{base}/moved"},
            "audio_reference": [{"audio_url": f"{base}/aud_stereo_32k.wav"}],
            "video_reference": f"{base}/vid_24fps.mp4",
        }
        job = await served.job(await served.client.post("/v1/videos", json=request))
        for name, reference in zip(names, job.plan.references, strict=True):
            assert served.artifacts.input(job.id, reference.file).read_bytes() == (cases / name).read_bytes()
        assert len(served.files()) == 3

    fetching(tmp_path, body)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2:{port}/",
        "http://[::1]:{port}/",
        "http://169.254.169.254/",
        "http://2130706433:{port}/",
        "http://localhost:{port}/",
        "http://127.0.0.1.other.test:{port}/",
        "http://u:p@127.0.0.1:{port}/",
        "http://127.0.0.1:{port}/to-inner",
        "http://127.0.0.1:{port}/to-file",
        "http://127.0.0.1:{port}/slow",
        "http://127.0.0.1:{port}/none",
        "http://127.0.0.1:{port}/no-picture",
        "http://127.0.0.1:{port}/large",
    ],
)
def test_what_cannot_be_had_is_400_and_leaves_nothing(tmp_path: Path, url: str) -> None:  # case 25
    async def body(served: Served, server: Listening, _base: str) -> None:
        server.answers |= {
            "/": ok(b"secret"),
            "/to-inner": moved(f"http://localhost:{server.port}/"),
            "/to-file": moved("file:///etc/passwd"),
            "/none": b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
            "/no-picture": ok(b"text"),
            "/large": ok(bytes(3000)),
        }
        begun = time.monotonic()
        asked = {**GOOD, "image_reference": [{"image_url": url.format(port=server.port)}]}
        assert error(await served.client.post("/v1/videos", json=asked))["param"] == "image_reference"
        assert time.monotonic() - begun < 20
        assert b"GET / " not in b"".join(server.requests)
        assert (served.files(), await served.store.ids()) == ([], frozenset())

    limits = dataclasses.replace(LIMITS, caps=dataclasses.replace(LIMITS.caps, image_bytes=2000))
    fetching(tmp_path, body, limits, SOON)


def test_one_url_that_is_refused_spares_the_other_hosts(tmp_path: Path) -> None:  # case 25
    async def body(served: Served, server: Listening, base: str) -> None:
        urls = [{"image_url": f"{base}/a"}, {"image_url": "http://10.0.0.1/"}]
        answer = await served.client.post("/v1/videos", json={**GOOD, "image_reference": urls})
        assert error(answer)["param"] == "image_reference[1]"
        many = [{"image_url": f"{base}/a"}] * 13
        error(await served.client.post("/v1/videos", json={**GOOD, "image_reference": many}))
        assert server.connections == 0

    fetching(tmp_path, body)


def test_all_are_fetched_at_once_and_one_failure_ends_the_others(tmp_path: Path) -> None:
    async def body(served: Served, server: Listening, base: str) -> None:
        server.answers["/none"] = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"
        server.first_come = 4
        urls = [{"image_url": f"{base}/silent"}] * 3 + [{"image_url": f"{base}/none"}]
        begun = time.monotonic()
        answer = await served.client.post("/v1/videos", json={**GOOD, "image_reference": urls})
        assert error(answer)["param"] == "image_reference[3]"
        assert time.monotonic() - begun < 15
        await asyncio.sleep(0)
        assert server.connections == 4

    fetching(tmp_path, body)


def test_a_url_is_known_again_by_its_text(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served, server: Listening, base: str) -> None:
        asked = {**GOOD, "image_reference": {"image_url": f"{base}/a"}}
        ids = set()
        for name in ("ref1.png", "ref2.png"):
            server.answers["/a"] = ok((cases / name).read_bytes())
            answer = await served.client.post("/v1/videos", json=asked, headers={"Idempotency-Key": "k"})
            ids.add((await served.job(answer)).id)
        assert len(ids) == 1

    fetching(tmp_path, body)
