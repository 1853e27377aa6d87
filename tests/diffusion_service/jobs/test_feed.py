"""Who watches a job hears of it, from this process and from others, and is let go when the service ends."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diffusion_service.jobs import feed as feed_module
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.memory import MemoryJobStore
from diffusion_service.jobs.store import Changes
from shared_schema.errors import StoreUnavailable
from tests.diffusion_service.jobs.made import new_job

A, B = "video_a", "video_b"


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(limited())


def test_only_those_who_watch_the_job_hear_of_it() -> None:
    async def body() -> None:
        feed = JobFeed()
        with feed.watch(A) as first, feed.watch(A) as second, feed.watch(B) as other:
            feed.tell(A)
            assert await first.changed()
            assert await second.changed()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(other.changed(), 0.02)

    run(body)


def test_a_change_between_two_waits_is_not_missed_and_many_count_once() -> None:
    async def body() -> None:
        feed = JobFeed()
        with feed.watch(A) as watch:
            feed.tell(A)
            feed.tell(A)
            assert await watch.changed()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch.changed(), 0.02)

    run(body)


def test_close_lets_everyone_go_also_those_who_come_later() -> None:
    async def body() -> None:
        feed = JobFeed()
        with feed.watch(A) as watch:
            waiting = asyncio.create_task(watch.changed())
            await asyncio.sleep(0)
            feed.close()
            assert not await waiting
            assert not await watch.changed()
        with feed.watch(B) as late:
            assert not await late.changed()

    run(body)


class Others(MemoryJobStore):
    """A store that other services write: nobody tells of its changes here."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int | None] = []
        self.away = False

    async def changes(self, after: int | None) -> Changes:
        self.asked.append(after)
        if self.away:
            raise StoreUnavailable("away")
        return await super().changes(after)


def test_changes_of_other_services_are_found_by_one_question_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "POLL_S", 0.01)
    monkeypatch.setattr(feed_module, "RECHECK_S", 1000.0)

    async def body() -> None:
        feed, store = JobFeed(), Others()
        first, second = await store.add(new_job(1), limit=10), await store.add(new_job(2), limit=10)
        following = asyncio.create_task(feed.follow(store))
        with feed.watch(first.id) as watch, feed.watch(second.id) as other:
            assert await watch.changed()
            assert await other.changed()
            await store.change(first.id, lambda job: job.start(1.0))
            assert await watch.changed()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(other.changed(), 0.05)
        assert store.asked[0] is None
        assert None not in store.asked[1:]
        await asyncio.sleep(0.03)
        asked = len(store.asked)
        await asyncio.sleep(0.05)
        assert len(store.asked) == asked, "nobody watches"
        with feed.watch(first.id) as watch:
            assert await watch.changed()
        assert store.asked[-1] is None, "what happened meanwhile is no concern of those who come now"
        following.cancel()

    run(body)


def test_a_database_that_is_away_for_a_while_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "POLL_S", 0.01)

    async def body() -> None:
        feed, store = JobFeed(), Others()
        job = await store.add(new_job(1), limit=10)
        following = asyncio.create_task(feed.follow(store))
        with feed.watch(job.id) as watch:
            assert await watch.changed()
            store.away = True
            await asyncio.sleep(0.05)
            await store.change(job.id, lambda now: now.start(1.0))
            store.away = False
            assert await watch.changed()
        following.cancel()

    run(body)


def test_a_job_that_another_service_removed_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "POLL_S", 0.01)
    monkeypatch.setattr(feed_module, "RECHECK_S", 0.05)

    async def body() -> None:
        feed, store = JobFeed(), Others()
        job = await store.add(new_job(1), limit=10)
        following = asyncio.create_task(feed.follow(store))
        with feed.watch(job.id) as watch:
            assert await watch.changed()
            await store.remove(job.id)
            assert await watch.changed()
        following.cancel()

    run(body)
