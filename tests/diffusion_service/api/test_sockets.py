"""The API behind a real server: the OpenAI SDK as people use it, and clients that leave or never end."""

import asyncio
import resource
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from diffusion_service.api.fields import Fields
from diffusion_service.api.limits import ServerLimits
from diffusion_service.api.references import Media, inspect
from tests.diffusion_service.api.served import Served, live, serve, until

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")

MIB = 2**20
SHORT = {"size": "64x64", "num_frames": 107}


def sdk(folder: Path, body: Callable[[Served, AsyncOpenAI], Awaitable[None]]) -> None:
    """Run `body` with the SDK's client."""

    async def run(served: Served, port: int) -> None:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
            await body(served, client)

    live(folder, run)


def test_the_sdk_goes_through_the_life_of_a_job(tmp_path: Path) -> None:
    async def body(served: Served, client: AsyncOpenAI) -> None:
        made = [await client.videos.create(prompt=str(n), seconds="8", size="1280x720") for n in range(3)]
        assert (made[0].status, made[0].size, made[0].seconds, made[0].model) == ("queued", "128x64", "8", "tiny")
        assert [video.id async for video in client.videos.list(limit=2)] == [video.id for video in made[::-1]]
        await served.runner.finish(made[0].id, b"clip")
        done = await client.videos.poll(made[0].id, poll_interval_ms=10)
        assert (done.status, done.progress) == ("completed", 100)
        assert (await client.videos.download_content(done.id)).content == b"clip"
        assert (await client.videos.delete(done.id)).deleted
        with pytest.raises(NotFoundError):
            await client.videos.retrieve(done.id)
        assert [model.id async for model in client.models.list()] == ["tiny", "minimax/h3"]

    sdk(tmp_path, body)


@pytest.mark.parametrize("spelling", ["path", "bytes", "tuple", "list"])
def test_the_sdk_sends_pictures_in_every_spelling(tmp_path: Path, cases: Path, spelling: str) -> None:
    async def body(served: Served, client: AsyncOpenAI) -> None:
        path, other = cases / "ref1.png", cases / "ref2.png"
        spelled: dict[str, object] = {
            "path": path,
            "bytes": path.read_bytes(),
            "tuple": ("x.jpg", path.read_bytes(), "image/jpeg"),
            "list": [path, ("ref1.png", other.read_bytes())],
        }
        video = await client.videos.create(prompt="x", input_reference=spelled[spelling], extra_body=SHORT)  # type: ignore[arg-type]
        job = await served.store.get(video.id)
        assert job is not None
        assert job.plan.keyframes == ((0, -1) if spelling == "list" else (0,))
        assert served.artifacts.input(job.id, job.plan.references[0].file).read_bytes() == path.read_bytes()

    sdk(tmp_path, body)


def test_the_sdk_sends_nested_values_as_brackets(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served, client: AsyncOpenAI) -> None:
        extra = {
            **SHORT,
            "return_stage_metrics": True,
            "seed": None,
            "extra_params": {"task": "fl2va", "frame_indices": [-1], "target": {"short_edge": 64}, "flow_shift": 3.5},
            "image_reference": [{"image_url": "data:image/png;base64,AA=="}],
        }
        with pytest.raises(BadRequestError) as caught:
            await client.videos.create(prompt="x", extra_body=extra)
        assert caught.value.param == "image_reference"
        del extra["image_reference"]
        video = await client.videos.create(prompt="x", input_reference=cases / "ref1.png", extra_body=extra)
        job = await served.store.get(video.id)
        assert job is not None
        assert (job.plan.keyframes, job.plan.flow_shift, job.plan.return_stage_metrics) == ((-1,), 3.5, True)

    sdk(tmp_path, body)


def form(cases: Path, name: str) -> tuple[bytes, bytes]:
    """Head and body of a request with that file."""
    parts = b""
    for field, value in {"prompt": "x", **SHORT}.items():
        parts += f'--b\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
    parts += b'--b\r\nContent-Disposition: form-data; name="input_reference"; filename="a"\r\n\r\n'
    parts += (cases / name).read_bytes() + b"\r\n--b--\r\n"
    return request_head(f"Content-Length: {len(parts)}"), parts


def request_head(length: str) -> bytes:
    lines = ("POST /v1/videos HTTP/1.1", "Host: h3", "Content-Type: multipart/form-data; boundary=b", length, "", "")
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99, 1.0])
def test_a_client_that_leaves_leaves_a_whole_job_or_none(  # case 6
    tmp_path: Path, cases: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_whole = threading.Event()

    def inspect_and_say(fields: Fields, limits: ServerLimits) -> Media:
        read_whole.set()
        return inspect(fields, limits)

    async def body(served: Served, port: int) -> None:
        head, parts = form(cases, "vid_15s.mp4")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + parts[: int(len(parts) * share)])
        await writer.drain()
        # What is still on its way would go with the connection.
        await until(lambda: share < 1 or read_whole.is_set())
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await until(lambda: not list((served.folder / "uploads").iterdir()) and (share < 1 or served.runner.wakes))
        ids = await served.store.ids()
        assert len(ids) == (1 if share == 1.0 else 0)
        assert served.files() == [f"inputs/{job_id}/000" for job_id in ids]

    monkeypatch.setattr("diffusion_service.api.intake.inspect", inspect_and_say)
    live(tmp_path, body)


@pytest.mark.parametrize("length", [f"Content-Length: {2048 * MIB}", "Transfer-Encoding: chunked"])
@pytest.mark.steady
def test_an_endless_upload_is_413_while_it_streams(tmp_path: Path, length: str) -> None:  # case 14
    async def body(served: Served, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        start = b'--b\r\nContent-Disposition: form-data; name="input_reference"; filename="a"\r\n\r\n'
        chunked = "chunked" in length

        def chunk(data: bytes) -> bytes:
            return b"%x\r\n%s\r\n" % (len(data), data) if chunked else data

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        writer.write(request_head(length) + chunk(start))
        answer, sent = asyncio.create_task(reader.read(65536)), 0
        while not answer.done() and sent < 600:
            writer.write(chunk(bytes(MIB)))
            sent += 1
            try:
                await writer.drain()
            except ConnectionError:
                break
        said = await answer
        writer.transport.abort()
        assert said.startswith(b"HTTP/1.1 413 ")
        assert b'"param":"input_reference"' in said or length.startswith("Content-Length")
        assert sent < 100
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
        assert served.files() == []

    live(tmp_path, body)


def test_a_client_that_leaves_sync_cancels_its_job(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served, port: int) -> None:
        head, parts = form(cases, "ref1.png")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.replace(b"/v1/videos ", b"/v1/videos/sync ") + parts)
        await until(lambda: served.runner.wakes)
        await asyncio.sleep(0.05)
        assert served.runner.cancelled == []
        writer.transport.abort()
        await until(lambda: served.runner.cancelled)
        (job_id,) = await served.store.ids()
        assert served.runner.cancelled == [job_id]

    live(tmp_path, body)


def test_many_requests_at_once_each_become_one_job_or_none(tmp_path: Path) -> None:  # cases 7, 10
    async def body(served: Served) -> None:
        good = [served.post({"prompt": "x", **SHORT}) for _ in range(20)]
        bad = [served.post({"prompt": "x", "seconds": "2"}) for _ in range(20)]
        answers = await asyncio.gather(*good, *bad)
        assert sorted(answer.status_code for answer in answers) == [200] * 20 + [400] * 20
        assert len(await served.store.ids()) == 20

    serve(tmp_path, body)
