"""Both job stores keep the same promises."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from diffusion_service.jobs.idempotency import Idempotency
from diffusion_service.jobs.job import Job, JobFailure, LeaseLost, Transition
from diffusion_service.jobs.memory import MemoryJobStore
from diffusion_service.jobs.sql.store import SqlJobStore
from diffusion_service.jobs.store import Changes, Held, JobStore
from diffusion_service.jobs.webhook import Webhook
from diffusion_service.scheduler import Waiting
from shared_schema.errors import Conflict, InvalidRequest, KeyBusy, NotFound, QueueFull
from tests.diffusion_service.jobs.made import PLAN, waiting

RETENTION_S = 60.0
LOST = JobFailure(code="worker_died", message="its service is gone")
Check = Callable[[JobStore], Awaitable[None]]


def new_job(number: int, priority: int = 0, key: str | None = None) -> Job:
    job_id = f"video_{number:032x}"
    return Job(id=job_id, sequence=0, plan=PLAN, created_at=1000.0 + number, priority=priority, key=key)


def first(candidates: Sequence[Waiting], _running: Mapping[str | None, int]) -> str | None:
    return candidates[0].id if candidates else None


def orphaned(job: Job) -> Job:
    return job.orphaned(LOST, 5000.0, RETENTION_S)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Check], None]:
    """Run an async check against a fresh store."""

    def open_store() -> JobStore:
        match request.param:
            case "memory":
                return MemoryJobStore()
            case "sqlite":
                return SqlJobStore(f"sqlite:///{tmp_path / 'jobs.db'}")
            case _:
                return SqlJobStore(request.getfixturevalue("postgres_url"))

    async def run(body: Check) -> None:
        store = open_store()
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


def test_what_is_unfinished_or_expired_is_found(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        jobs = [await store.add(new_job(n), limit=10) for n in (1, 2, 3)]
        assert await store.places(jobs[1:]) == {jobs[1].id: 2, jobs[2].id: 3}
        running = await store.change(jobs[0].id, lambda j: j.start(2000.0))
        done = await store.change(jobs[1].id, lambda j: j.cancel(2000.0, retention_s=10.0))
        assert await store.places([running, done, jobs[2]]) == {jobs[2].id: 1}
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


def test_the_queue_is_by_priority_then_age(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        low, old, new, high = [await store.add(new_job(n, p), 10) for n, p in ((1, -5), (2, 0), (3, 0), (4, 7))]
        assert await waiting(store) == [high.id, old.id, new.id, low.id]
        assert await store.places([old, low]) == {old.id: 2, low.id: 4}
        assert await store.places([new, high]) == {new.id: 3, high.id: 1}

    check(body)


def test_a_job_is_claimed_once_and_stays_queued(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        one, two = [await store.add(new_job(n, key="a"), 10) for n in (1, 2)]
        seen: list[tuple[int, Mapping[str | None, int]]] = []

        def choose(candidates: Sequence[Waiting], running: Mapping[str | None, int]) -> str | None:
            seen.append((len(candidates), dict(running)))
            return first(candidates, running)

        claimed = await store.claim("A", 0.0, 10.0, choose)
        assert claimed is not None
        assert (claimed.id, claimed.status, claimed.owner) == (one.id, "queued", "A")
        other = await store.claim("B", 0.0, 10.0, choose)
        assert other is not None
        assert other.id == two.id
        assert await store.claim("B", 0.0, 10.0, choose) is None
        assert seen == [(2, {}), (1, {"a": 1}), (0, {"a": 2})]

    check(body)


def test_an_instance_that_lost_its_lease_changes_nothing(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        job = await store.add(new_job(1), 10)
        await store.claim("A", 0.0, 10.0, first)
        await store.change(job.id, lambda j: j.start(1.0), instance="A")
        assert await store.reclaim(9.0, orphaned) == []
        assert [(j.status, j.attempt, j.owner) for j in await store.reclaim(10.0, orphaned)] == [("queued", 2, None)]
        assert await store.reclaim(10.0, orphaned) == []
        with pytest.raises(LeaseLost):
            await store.change(job.id, lambda j: j.start(11.0), instance="A")
        await store.claim("B", 11.0, 10.0, first)
        with pytest.raises(LeaseLost):
            await store.change(job.id, lambda j: j.start(12.0), instance="A")
        assert (await store.change(job.id, lambda j: j.start(12.0), instance="B")).status == "in_progress"

    check(body)


def test_a_renewed_lease_lasts_and_brings_the_wish_to_cancel(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        job, free = [await store.add(new_job(n), 10) for n in (1, 2)]
        await store.claim("A", 0.0, 10.0, first)
        assert await store.renew("A", 8.0, 10.0) == Held(frozenset({job.id}), frozenset())
        assert await store.renew("B", 8.0, 10.0) == Held(frozenset(), frozenset())
        assert await store.reclaim(17.0, orphaned) == []
        asked = await store.change(job.id, lambda j: j.ask_cancel(9.0, RETENTION_S))
        assert (asked.status, asked.cancel_requested) == ("queued", True)
        assert await store.renew("A", 9.0, 10.0) == Held(frozenset({job.id}), frozenset({job.id}))
        assert (await store.change(free.id, lambda j: j.ask_cancel(9.0, RETENTION_S))).status == "cancelled"
        assert [j.status for j in await store.reclaim(19.0, orphaned)] == ["cancelled"]
        assert await store.renew("A", 20.0, 10.0) == Held(frozenset(), frozenset())

    check(body)


def test_a_claimed_job_can_be_given_back(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        job = await store.add(new_job(1), 10)
        await store.claim("A", 0.0, 10.0, first)
        with pytest.raises(LeaseLost):
            await store.change(job.id, lambda j: j.handed_back(), instance="B")
        assert await waiting(store) == []
        await store.change(job.id, lambda j: j.handed_back(), instance="A")
        assert await waiting(store) == [job.id]
        assert await store.reclaim(100.0, orphaned) == []

    check(body)


def test_a_lost_job_begins_again_once_and_then_fails(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        job = await store.add(new_job(1), 10)
        for _ in range(2):
            await store.claim("A", 0.0, 10.0, first)
            await store.change(job.id, lambda j: j.start(1.0), instance="A")
            ended = await store.reclaim(10.0, orphaned)
        assert [(j.status, j.attempt, j.error) for j in ended] == [("failed", 2, LOST)]
        assert await store.expired(5000.0 + RETENTION_S) == ended

    check(body)


def test_history_has_what_a_caller_can_see_change(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        start = await store.changes(None)
        job, other = await store.add(new_job(1), 10), await store.add(new_job(2), 10)
        await store.claim("A", 0.0, 10.0, first)
        await store.change(job.id, lambda j: j.start(1.0))
        quiet = await store.change(job.id, lambda j: j.encoded((), {"encode": 1.0}))
        done = await store.change(job.id, lambda j: j.fail(LOST, 2.0, RETENTION_S))
        events = await store.events(job.id)
        assert [event.status for event in events] == ["queued", "in_progress", "failed"]
        assert [event.revision for event in events] == [job.revision, quiet.revision, done.revision]
        assert await store.events(job.id, after=quiet.revision) == events[-1:]
        assert await store.changes(start.revision) == Changes(done.revision, frozenset({job.id, other.id}))
        assert await store.changes(other.revision) == Changes(done.revision, frozenset({job.id}))
        assert await store.changes(done.revision) == Changes(done.revision, frozenset())
        await store.remove(job.id)
        assert await store.events(job.id) == []
        assert await store.changes(done.revision) == Changes(done.revision, frozenset())
        assert (await store.change(other.id, lambda j: j.start(3.0))).revision > done.revision

    check(body)


def test_a_page_of_one_key_shows_no_other_key(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        mine = [await store.add(new_job(n, key="a"), 10) for n in (1, 3)]
        other = await store.add(new_job(2, key="b"), 10)
        assert (await store.page(None, 5, "asc", key="a")).jobs == tuple(mine)
        assert (await store.page(mine[0].id, 5, "asc", key="a")).jobs == (mine[1],)
        assert len((await store.page(None, 5, "asc")).jobs) == 3
        with pytest.raises(InvalidRequest):
            await store.page(other.id, 5, "asc", key="a")

    check(body)


def test_a_key_has_a_limit_of_its_own(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        job = await store.add(new_job(1, key="a"), 10, key_limit=1)
        with pytest.raises(KeyBusy):
            await store.add(new_job(2, key="a"), 10, key_limit=1)
        await store.add(new_job(3, key="b"), 10, key_limit=1)
        await store.change(job.id, lambda j: j.cancel(2.0, RETENTION_S))
        await store.add(new_job(2, key="a"), 10, key_limit=1)

    check(body)


def test_the_same_request_is_one_job(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        claim = Idempotency("once", "d1", retry=False)
        answers = await asyncio.gather(*(store.add(new_job(n, key="a"), 1, claim=claim) for n in range(50)))
        assert len({job.id for job in answers}) == 1
        kept = answers[0]
        with pytest.raises(Conflict):
            await store.add(new_job(60, key="a"), 10, claim=Idempotency("once", "d2", retry=True))
        stranger = await store.add(new_job(61, key="b"), 10, claim=claim)
        assert stranger.id == new_job(61).id
        assert (await store.add(new_job(62, key="a"), 10, claim=Idempotency(None, "d1", retry=True))).id == kept.id
        fresh = await store.add(new_job(63, key="a"), 10, claim=Idempotency(None, "d1", retry=False))
        assert fresh.id == new_job(63).id
        late = new_job(64, key="a").model_copy(update={"created_at": kept.created_at + 86_400})
        assert (await store.add(late, 10, claim=claim)).id == late.id

    check(body)


def test_a_key_is_known_for_a_day_and_what_a_client_repeats_for_ten_minutes(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        kept = await store.add(new_job(1), 10, claim=Idempotency("once", "d1", retry=False))

        async def again(number: int, after_s: float, claim: Idempotency) -> bool:
            late = new_job(number).model_copy(update={"created_at": kept.created_at + after_s})
            return (await store.add(late, 10, claim=claim)).id == kept.id

        repeat = Idempotency(None, "d1", retry=True)
        assert await again(2, 599.0, repeat)
        assert not await again(3, 1.0, Idempotency(None, "d2", retry=True))
        assert not await again(4, 600.0, repeat)
        assert await again(5, 86_399.0, Idempotency("once", "d1", retry=False))
        assert not await again(6, 86_400.0, Idempotency("once", "d2", retry=False))

    check(body)


def test_a_webhook_is_due_at_the_end_and_in_one_pair_of_hands(check: Callable[[Check], None]) -> None:
    async def body(store: JobStore) -> None:
        jobs = [new_job(n).model_copy(update={"webhook": Webhook(url="http://hook")}) for n in (1, 2)]
        for job in jobs:
            await store.add(job, 10)
        assert await store.due_webhooks(1e9, 5.0, 10) == []
        for job in jobs:
            await store.change(job.id, lambda j: j.cancel(100.0, RETENTION_S))
        assert [job.id for job in await store.due_webhooks(100.0, 5.0, 1)] == [jobs[0].id]
        assert [job.id for job in await store.due_webhooks(100.0, 5.0, 9)] == [jobs[1].id]
        assert await store.due_webhooks(104.0, 5.0, 9) == []
        later = jobs[0].id
        await store.change(later, lambda job: job.hooked(lambda hook: hook.refused(500, "", next_at=104.5, limit=9)))
        await store.change(jobs[1].id, lambda job: job.hooked(lambda hook: hook.refused(500, "", next_at=104, limit=9)))
        again = await store.due_webhooks(105.0, 5.0, 9)
        assert [job.id for job in again] == [jobs[1].id, later], "a receiver that refuses much keeps no other waiting"
        assert [job.webhook and job.webhook.attempts for job in again] == [2, 2]

    check(body)


def test_every_change_is_told_once_it_is_kept(tmp_path: Path) -> None:
    async def body() -> None:
        told: list[str] = []
        for store in (MemoryJobStore(tell=told.append), SqlJobStore(f"sqlite:///{tmp_path}/jobs.db", tell=told.append)):
            told.clear()
            job = await store.add(new_job(1), 10)
            await store.claim("A", 0.0, 10.0, first)
            await store.change(job.id, lambda j: j.handed_back(), instance="A")
            await store.claim("A", 0.0, 10.0, first)
            await store.reclaim(10.0, orphaned)
            await store.change(job.id, lambda j: j.start(1.0))
            await store.remove(job.id)
            await store.remove(job.id)
            assert told == [job.id] * 7
            await store.close()

    asyncio.run(body())


def test_a_change_is_told_also_if_its_caller_is_cancelled_meanwhile(tmp_path: Path) -> None:
    told: list[str] = []

    async def body() -> None:
        store = SqlJobStore(f"sqlite:///{tmp_path / 'jobs.db'}", tell=told.append)
        job = await store.add(new_job(1), limit=5)
        told.clear()
        begun, held = threading.Event(), threading.Event()

        def slow(now: Job) -> Job:
            begun.set()
            held.wait(60)
            return now.start(1.0)

        changing = asyncio.create_task(store.change(job.id, slow))
        await asyncio.sleep(0)
        await asyncio.to_thread(begun.wait, 60)
        changing.cancel()
        await asyncio.sleep(0.05)
        held.set()
        # In the same thread, and so after it.
        await store.ids()
        kept = await store.get(job.id)
        await store.close()
        assert (kept and kept.status, told) == ("in_progress", [job.id])

    asyncio.run(body())
