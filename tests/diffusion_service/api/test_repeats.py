"""The same request again: one job, whoever repeats it and however often."""

import asyncio
import base64
import dataclasses
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.diffusion_service.api.served import LIMITS, Served, error, live, part, serve

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
GOOD: dict[str, object] = {"prompt": "a red ball", "size": "64x64", "num_frames": 107, "seed": -1}
KEY = {"idempotency_key": "order-7"}
AGAIN = {"x_stainless_retry_count": "1"}


def test_fifty_at_once_with_one_key_are_one_job(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served) -> None:
        picture = part(cases / "ref1.png")
        answers = await asyncio.gather(*(served.post(GOOD, [picture], **KEY) for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        (job_id,) = {answer.json()["id"] for answer in answers}
        assert await served.store.ids() == {job_id}
        assert served.files() == [f"inputs/{job_id}/000"]
        assert served.runner.wakes == 1

    serve(tmp_path, body)


def test_a_key_means_the_same_in_every_content_type_and_in_a_full_queue(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        headers = {"Idempotency-Key": "order-7"}
        answers = [
            await served.post(GOOD, **KEY),
            await served.client.post("/v1/videos", json=GOOD, headers=headers),
            await served.client.post("/v1/videos", data=GOOD, headers=headers),
        ]
        assert len({(await served.job(answer)).id for answer in answers}) == 1

    serve(tmp_path, body, dataclasses.replace(LIMITS, queue_limit=1))


@pytest.mark.parametrize("change", [{"prompt": "another"}, {"seed": 1}, {"num_frames": None}, {"priority": 5}])
def test_a_key_with_another_body_is_409_and_no_job(tmp_path: Path, change: dict[str, object]) -> None:
    async def body(served: Served) -> None:
        first = await served.job(await served.post(GOOD, **KEY))
        assert error(await served.post({**GOOD, **change}, **KEY), 409)["param"] == "Idempotency-Key"
        assert await served.store.ids() == {first.id}
        assert (await served.post({**GOOD, **change}, idempotency_key="order-8")).json()["id"] != first.id

    serve(tmp_path, body)


def test_media_are_part_of_the_body(tmp_path: Path, cases: Path) -> None:
    async def body(served: Served) -> None:
        def as_url(name: str) -> dict[str, object]:
            data = base64.b64encode((cases / name).read_bytes()).decode()
            return {**GOOD, "image_reference": {"image_url": f"data:image/png;base64,{data}"}}

        headers = {"Idempotency-Key": "order-7"}
        first = await served.client.post("/v1/videos", json=as_url("ref1.png"), headers=headers)
        again = await served.client.post("/v1/videos", json=as_url("ref1.png"), headers=headers)
        assert (await served.job(first)).id == (await served.job(again)).id
        error(await served.client.post("/v1/videos", json=as_url("ref2.png"), headers=headers), 409)
        await served.job(await served.post(GOOD, [part(cases / "ref1.png")], idempotency_key="file"))
        error(await served.post(GOOD, [part(cases / "ref2.png")], idempotency_key="file"), 409)
        assert len(served.files()) == 2

    serve(tmp_path, body)


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "ä"])
def test_what_is_no_key_is_refused(tmp_path: Path, key: str) -> None:
    async def body(served: Served) -> None:
        headers = {"Idempotency-Key": key.encode("latin-1")}
        answer = await served.client.post("/v1/videos", json=GOOD, headers=headers)
        assert error(answer)["param"] == "Idempotency-Key"

    serve(tmp_path, body)


def test_what_the_sdk_repeats_by_itself_finds_its_job(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        first = await served.job(await served.post(GOOD, x_stainless_retry_count="0"))
        assert (await served.post(GOOD, **AGAIN)).json()["id"] == first.id
        others = [
            await served.post(GOOD),
            await served.post(GOOD, x_stainless_retry_count="0"),
            await served.post({**GOOD, "prompt": "another"}, **AGAIN),
        ]
        assert len({(await served.job(answer)).id for answer in others} | {first.id}) == 4

    serve(tmp_path, body)


def test_the_sdk_gets_one_job_for_answers_that_are_lost(tmp_path: Path) -> None:
    async def body(served: Served, port: int) -> None:
        lost = 0

        async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Carries requests to the API, and cuts the first two answers off."""
            nonlocal lost
            inner, outer = await asyncio.open_connection("127.0.0.1", port)
            carrying = asyncio.create_task(carry(reader, outer))
            answer = await inner.read(65536)
            lost += 1
            if lost > 2:
                writer.write(answer)
                await writer.drain()
            carrying.cancel()
            outer.close()
            writer.close()

        async def carry(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                to.write(data)
                await to.drain()

        server = await asyncio.start_server(lose, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[1]
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{address}/v1", api_key="any", max_retries=2) as client:
            video = await client.videos.create(prompt="hi", extra_body={"size": "64x64"})
        server.close()
        assert (lost, await served.store.ids()) == (3, {video.id})

    live(tmp_path, body)


def test_a_repeat_that_leaves_cancels_nothing(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        first = await served.job(await served.post(GOOD, **KEY))
        waiting = asyncio.create_task(served.post(GOOD, path="/v1/videos/sync", **KEY))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert served.runner.cancelled == []
        await served.runner.finish(first.id, b"clip")
        assert (await served.post(GOOD, path="/v1/videos/sync", **KEY)).content == b"clip"

    serve(tmp_path, body)
