"""Both job stores keep the same promises."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from diffusion_service.jobs.job import Job, Transition, VideoPlan
from diffusion_service.jobs.store import JobStore, MemoryJobStore, SqlJobStore
from shared_schema.errors import InvalidRequest, NotFound, QueueFull
from shared_schema.tasks import Task

PLAN = VideoPlan(
    model="tiny",
    task=Task.T2VA,
    prompt="a red ball",
    height=64,
    width=96,
    num_frames=107,
    num_inference_steps=2,
    flow_shift=12.0,
    audio_flow_shift=3.0,
    seed=1,
)
Check = Callable[[JobStore], Awaitable[None]]


def new_job(number: int) -> Job:
    return Job(id=f"video_{number:032x}", sequence=0, plan=PLAN, created_at=1000.0 + number)


@pytest.fixture(params=["memory", "sqlite"])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Check], None]:
    """Run an async check against a fresh store."""

    async def run(body: Check) -> None:
        store: JobStore
        store = MemoryJobStore() if request.param == "memory" else SqlJobStore(f"sqlite:///{tmp_path / 'jobs.db'}")
        try:
            await body(store)
        finally:
            await store.close()

    return lambda body: asyncio.run(run(body))


def test_a_job_comes_back_as_it_was_added(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        added = await store.add(new_job(1), limit=10)
        assert added.sequence == 1
        assert await store.get(added.id) == added
        assert await store.get("video_0") is None
        assert await store.ids() == {added.id}

    check(body)


def test_a_full_queue_keeps_nothing(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        await store.add(new_job(1), limit=2)
        await store.add(new_job(2), limit=2)
        with pytest.raises(QueueFull):
            await store.add(new_job(3), limit=2)
        assert await store.get(new_job(3).id) is None
        await store.change(new_job(1).id, lambda job: job.start(2000.0))
        assert (await store.add(new_job(3), limit=2)).id == new_job(3).id

    check(body)


def test_a_number_is_never_given_twice(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        first = await store.add(new_job(1), limit=10)
        await store.remove(first.id)
        await store.remove(first.id)
        assert (await store.add(new_job(2), limit=10)).sequence == first.sequence + 1

    check(body)


def test_a_change_is_written_or_not_at_all(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        job = await store.add(new_job(1), limit=10)
        started = await store.change(job.id, lambda j: j.start(2000.0))
        assert (started.status, started.sequence) == ("in_progress", job.sequence)
        with pytest.raises(Transition):
            await store.change(job.id, lambda j: j.start(3000.0))
        assert await store.get(job.id) == started
        with pytest.raises(NotFound):
            await store.change("video_0", lambda j: j)

    check(body)


def test_pages_follow_the_sequence_in_both_orders(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        ids = [(await store.add(new_job(n), limit=10)).id for n in (5, 3, 4, 1)]
        first = await store.page(None, 3, "desc")
        assert [job.id for job in first.jobs] == ids[:0:-1]
        assert first.has_more
        rest = await store.page(first.jobs[-1].id, 3, "desc")
        assert ([job.id for job in rest.jobs], rest.has_more) == ([ids[0]], False)
        assert [job.id for job in (await store.page(ids[0], 2, "asc")).jobs] == ids[1:3]
        with pytest.raises(InvalidRequest) as caught:
            await store.page("video_0", 3, "asc")
        assert caught.value.param == "after"

    check(body)


def test_the_queue_is_by_age_and_skips_what_it_is_told(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        jobs = [await store.add(new_job(n), limit=10) for n in (1, 2, 3)]
        assert await store.next_queued() == jobs[0]
        assert await store.next_queued({jobs[0].id}) == jobs[1]
        assert await store.queued_ahead(jobs[2].sequence) == 2
        running = await store.change(jobs[0].id, lambda j: j.start(2000.0))
        done = await store.change(jobs[1].id, lambda j: j.cancel(2000.0, retention_s=10.0))
        assert await store.next_queued() == jobs[2]
        assert await store.queued_ahead(jobs[2].sequence) == 0
        assert await store.unfinished() == [running, jobs[2]]
        assert await store.expired(2009.0) == []
        assert await store.expired(2010.0) == [done]

    check(body)


def test_sqlite_keeps_jobs_past_the_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"

    async def write() -> Job:
        store = SqlJobStore(url)
        job = await store.add(new_job(1), limit=10)
        await store.close()
        return job

    async def read() -> list[Job]:
        store = SqlJobStore(url)
        jobs = await store.unfinished()
        await store.close()
        return jobs

    written = asyncio.run(write())
    assert asyncio.run(read()) == [written]


def test_two_hundred_writers_lose_no_change(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        job = await store.add(new_job(1), limit=10)

        def count(j: Job) -> Job:
            return j.encoded((), {"ticks": j.stage_durations.get("ticks", 0.0) + 1})

        await asyncio.gather(*(store.change(job.id, count) for _ in range(200)))
        kept = await store.get(job.id)
        assert kept is not None
        assert kept.stage_durations == {"ticks": 200.0}

    check(body)
