"""Event streams over real sockets: every change once, resumed where they were, cheap, and never in anybody's way."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from diffusion_service.api import sse, streams
from diffusion_service.jobs.job import Job
from tests.diffusion_service.api.served import Served, live, until
from tests.diffusion_service.jobs.made import completed, new_job

Body = Callable[[Served, httpx.AsyncClient], Awaitable[None]]
ID = new_job().id
EVENTS = f"/v1/videos/{ID}/events"


def with_job(folder: Path, body: Body) -> None:
    """Run `body` with one queued job and a client of the live API."""

    async def run(served: Served, port: int) -> None:
        await served.store.add(new_job(), limit=10)
        async with asyncio.timeout(90), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            await body(served, client)

    live(folder, run)


class Reader:
    """One client of a stream."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.aiter_lines()
        self.comments = 0

    async def event(self) -> tuple[str | None, dict[str, Any]]:
        """The id of the next event and what it says."""
        event_id = None
        async for line in self._lines:
            if line.startswith(":"):
                self.comments += 1
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            if line.startswith("data: "):
                return event_id, json.loads(line.removeprefix("data: "))
        raise EOFError

    async def silence(self, comments: int) -> None:
        """Until so many comments came; an event meanwhile is an error."""
        async for line in self._lines:
            assert not line.startswith("data")
            self.comments += line.startswith(":")
            if self.comments == comments:
                return

    async def rest(self) -> list[dict[str, Any]]:
        """Every event until the stream ends."""
        found = []
        while True:
            try:
                found.append((await self.event())[1])
            except EOFError:
                return found


@asynccontextmanager
async def reading(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[Reader]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.stream("GET", EVENTS, headers=sent) as response:
        assert response.status_code == 200
        yield Reader(response)


def seen(events: list[dict[str, Any]]) -> list[tuple[str, str | None, int]]:
    return [(event["type"], event["phase"], event["progress"]) for event in events]


async def reach(served: Served, *changes: Callable[[Job], Job]) -> None:
    for change in changes:
        await served.store.change(ID, change)


def start(job: Job) -> Job:
    return job.start(1001.0)


def progress(percent: int) -> Callable[[Job], Job]:
    return lambda job: job.model_copy(update={"phase": "denoising", "progress": percent})


LIFE = [
    ("video.queued", "queued", 0),
    ("video.in_progress", "queued", 0),
    ("video.in_progress", "denoising", 40),
    ("video.completed", None, 100),
]


def test_every_change_is_sent_as_it_happens_and_the_stream_ends_with_the_job(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        async with reading(client) as reader:
            headers = reader.response.headers
            assert headers["content-type"].startswith("text/event-stream")
            assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-store")
            events = [(await reader.event())[1]]
            for change in (start, progress(40), completed):
                await reach(served, change)
                events.append((await reader.event())[1])
            assert await reader.rest() == []
        assert seen(events) == LIFE
        assert all(event["video_id"] == ID and event["at"] > 0 for event in events)

    with_job(tmp_path, body)


def test_a_change_of_something_else_is_no_event(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        async with reading(client) as reader:
            await reader.event()
            await reach(served, lambda job: job.encoded((), {"encode": 1.0}), completed)
            assert seen(await reader.rest()) == [LIFE[-1]]

    with_job(tmp_path, body)


def test_a_late_reader_gets_the_history_and_one_that_comes_again_only_what_it_missed(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        async with reading(client) as reader:
            first_id, _ = await reader.event()
        await reach(served, start, progress(40), completed)
        async with reading(client) as reader:
            assert seen(await reader.rest()) == LIFE
        async with reading(client, last_event_id=str(first_id)) as reader:
            second_id, event = await reader.event()
            assert seen([event, *await reader.rest()]) == LIFE[1:]
        assert int(second_id or 0) > int(first_id or 0)

    with_job(tmp_path, body)


def test_a_browser_that_has_seen_the_end_is_told_not_to_come_again(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        await reach(served, completed)
        last = (await served.store.events(ID))[-1].revision
        answer = await client.get(EVENTS, headers={"last-event-id": str(last)})
        assert (answer.status_code, answer.content) == (204, b"")

    with_job(tmp_path, body)


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "1" * 19, "٣"])
def test_an_id_that_is_none_of_ours_is_refused(tmp_path: Path, last: str) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        answer = await client.get(EVENTS, headers=[(b"last-event-id", last.encode())])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")

    with_job(tmp_path, body)


def test_an_unknown_job_has_no_stream_and_a_deleted_one_ends_it(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/videos/video_0/events")).status_code == 404
        async with reading(client) as reader:
            await reader.event()
            await client.delete(f"/v1/videos/{ID}")
            rest = await reader.rest()
            assert rest[-1]["type"] == "video.deleted"

    with_job(tmp_path, body)


def test_a_job_that_ended_before_events_were_kept_shows_its_end(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        await reach(served, completed)
        served.store._events[ID].clear()
        async with reading(client) as reader:
            event_id, event = await reader.event()
            assert (event_id, seen([event]), await reader.rest()) == (None, [LIFE[-1]], [])

    with_job(tmp_path, body)


def test_silence_is_broken_by_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streams.COMMENT_S == 15
    monkeypatch.setattr(streams, "COMMENT_S", 0.05)

    async def body(served: Served, client: httpx.AsyncClient) -> None:
        async with reading(client) as reader:
            await reader.event()
            await reader.silence(3)
            await reach(served, completed)
            assert seen(await reader.rest()) == [LIFE[-1]]

    with_job(tmp_path, body)


def test_many_streams_of_a_job_cost_one_reading_and_one_encoding_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = sse.event_frame

    def counted(event: Any) -> bytes:
        encoded.append(event.revision)
        return encode(event)

    monkeypatch.setattr(streams, "event_frame", counted)

    async def body(served: Served, client: httpx.AsyncClient) -> None:
        reads = 0
        read = served.store.events

        async def counted_read(job_id: str, after: int | None = None) -> Any:
            nonlocal reads
            reads += 1
            return await read(job_id, after)

        monkeypatch.setattr(served.store, "events", counted_read)

        async def listen(begun: asyncio.Semaphore) -> list[dict[str, Any]]:
            async with reading(client) as reader:
                events = [(await reader.event())[1]]
                begun.release()
                return [*events, *await reader.rest()]

        begun = asyncio.Semaphore(0)
        listeners = [asyncio.create_task(listen(begun)) for _ in range(50)]
        for _ in listeners:
            await begun.acquire()
        await reach(served, start)
        await asyncio.sleep(0.05)
        await reach(served, progress(40))
        await asyncio.sleep(0.05)
        await reach(served, completed)
        for listener in listeners:
            assert seen(await listener) == LIFE
        assert len(encoded) == len(set(encoded)) == 4
        assert reads <= 4

    with_job(tmp_path, body)


def test_other_work_goes_on_between_the_readers_of_one_change(tmp_path: Path) -> None:
    async def body(served: Served, _: httpx.AsyncClient) -> None:
        read = 0

        async def listen() -> None:
            nonlocal read
            async for frame in shared.frames(ID, 0):
                read += frame.count(b"data: ")

        shared = streams.EventStreams(served.store, served.feed)
        listeners = [asyncio.create_task(listen()) for _ in range(100)]
        await until(lambda: read == 100)  # that it is queued
        await reach(served, start)
        turns = [read]
        while read < 200:
            await asyncio.sleep(0)
            turns.append(read)
        assert max(later - earlier for earlier, later in pairwise(turns)) <= streams.WOKEN_AT_ONCE
        await reach(served, completed)
        await asyncio.gather(*listeners)

    with_job(tmp_path, body)


def watched(served: Served) -> int:
    return len(served.feed._watches)


def test_a_reader_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        async with reading(client) as reader:
            await reader.event()
            assert watched(served) == 1
        await until(lambda: watched(served) == 0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("events of")]

    with_job(tmp_path, body)


def test_a_reader_that_stands_still_holds_nobody_up(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        _, still = await asyncio.open_connection("127.0.0.1", int(client.base_url.port or 0))
        still.write(f"GET {EVENTS} HTTP/1.1\r\nHost: h3\r\n\r\n".encode())
        still.transport.pause_reading()  # type: ignore[attr-defined]
        async with reading(client) as reader:
            await reach(served, start)
            for percent in range(1, 4_000):
                await reach(served, progress(percent))
            await reach(served, completed)
            assert seen(await reader.rest())[-1] == LIFE[-1]
        still.transport.abort()
        await until(lambda: watched(served) == 0)

    with_job(tmp_path, body)


def test_the_end_of_the_service_ends_its_streams_cleanly(tmp_path: Path) -> None:
    async def body(served: Served, client: httpx.AsyncClient) -> None:
        async with reading(client) as reader:
            await reader.event()
            served.feed.close()
            assert await reader.rest() == []
        async with reading(client) as late:
            assert seen(await late.rest()) == LIFE[:1]

    with_job(tmp_path, body)
