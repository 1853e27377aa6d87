"""Whatever is asked of a job store, in whatever order, it does what a few dictionaries do."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from diffusion_service.jobs.idempotency import Idempotency
from diffusion_service.jobs.job import Job, JobFailure, LeaseLost, Transition
from diffusion_service.jobs.memory import MemoryJobStore
from diffusion_service.jobs.sql.store import SqlJobStore
from diffusion_service.jobs.store import JobStore
from diffusion_service.scheduler import Waiting
from shared_schema.errors import Conflict, KeyBusy, NotFound, QueueFull
from tests.diffusion_service.jobs.test_store import new_job
from tests.postgres import PostgresServer

LIMIT, KEY_LIMIT, LEASE_S, RETENTION_S = 6, 3, 10.0, 50.0
LOST = JobFailure(code="worker_died", message="its service is gone")
INSTANCES = st.sampled_from(["A", "B"])


@dataclass(frozen=True)
class Kept:
    """What the model knows of a job."""

    id: str
    number: int
    priority: int
    key: str | None
    status: str = "queued"
    owner: str | None = None
    lease_until: float = 0.0
    attempt: int = 1
    wanted: bool = True
    expires_at: float | None = None
    events: tuple[str, ...] = ("queued",)
    claim: tuple[str, str] | None = None

    @property
    def finished(self) -> bool:
        return self.status in ("failed", "cancelled")

    def now(self, status: str, **changes: Any) -> "Kept":
        events = self.events if status == self.status else (*self.events, status)
        return replace(self, status=status, events=events, **changes)

    def ended(self, status: str, now: float) -> "Kept":
        return self.now(status, owner=None, wanted=True, expires_at=now + RETENTION_S)


class StoreMachine(RuleBasedStateMachine):
    """Rules act on store and model alike; the invariant compares all that can be seen."""

    store: JobStore
    loop: asyncio.AbstractEventLoop
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, Kept] = {}
        self.clock = 1000.0
        self.added = 0

    def ask(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    @rule(target=ids, priority=st.integers(-1, 1), key=st.sampled_from([None, "a"]), repeat=st.booleans())
    def add(self, priority: int, key: str | None, repeat: bool) -> Any:
        self.added += 1
        job = new_job(self.added, priority, key).model_copy(update={"created_at": self.clock})
        name = f"{key}-{self.added - 1 if repeat else self.added}"
        call = self.store.add(job, LIMIT, key_limit=KEY_LIMIT, claim=Idempotency(name, name, retry=False))
        earlier = next((kept for kept in self.model.values() if kept.claim == (str(key), name)), None)
        if earlier is not None:
            assert self.ask(call).id == earlier.id
            return multiple()
        if sum(kept.status == "queued" for kept in self.model.values()) >= LIMIT:
            with pytest.raises(QueueFull):
                self.ask(call)
            return multiple()
        if sum(kept.key == key and not kept.finished for kept in self.model.values()) >= KEY_LIMIT:
            with pytest.raises(KeyBusy):
                self.ask(call)
            return multiple()
        self.ask(call)
        self.model[job.id] = Kept(job.id, self.added, priority, key, claim=(str(key), name))
        return job.id

    @rule(job_id=ids)
    def another_body_under_the_same_key(self, job_id: str) -> None:
        kept = self.model.get(job_id)
        if kept is not None and kept.claim is not None:
            fresh = new_job(999, key=kept.key).model_copy(update={"created_at": self.clock})
            with pytest.raises(Conflict):
                self.ask(self.store.add(fresh, LIMIT, claim=Idempotency(kept.claim[1], "other", retry=False)))

    @rule(instance=INSTANCES)
    def claim(self, instance: str) -> None:
        expected = [kept for kept in self.line() if kept.owner is None]

        def choose(candidates: Sequence[Waiting], running: Mapping[str | None, int]) -> str | None:
            assert [each.id for each in candidates] == [kept.id for kept in expected]
            owned = [kept.key for kept in self.model.values() if kept.owner is not None]
            assert {key: count for key, count in running.items() if count} == {key: owned.count(key) for key in owned}
            return candidates[0].id if candidates else None

        claimed = self.ask(self.store.claim(instance, self.clock, LEASE_S, choose))
        assert (claimed and claimed.id) == (expected[0].id if expected else None)
        if expected:
            lease = self.clock + LEASE_S
            self.model[expected[0].id] = replace(expected[0], owner=instance, lease_until=lease)

    @rule(job_id=ids, instance=INSTANCES)
    def start(self, job_id: str, instance: str) -> None:
        self.change(
            job_id,
            instance,
            lambda job: job.start(self.clock),
            lambda kept: kept.now("in_progress") if kept.status == "queued" else None,
        )

    @rule(job_id=ids, instance=INSTANCES)
    def fail(self, job_id: str, instance: str) -> None:
        self.change(
            job_id,
            instance,
            lambda job: job.fail(LOST, self.clock, RETENTION_S),
            lambda kept: None if kept.finished else kept.ended("failed", self.clock),
        )

    @rule(job_id=ids, instance=INSTANCES)
    def requeue(self, job_id: str, instance: str) -> None:
        self.change(
            job_id,
            instance,
            lambda job: job.requeue(),
            lambda kept: (
                kept.now("queued", owner=None, attempt=kept.attempt + 1) if kept.status == "in_progress" else None
            ),
        )

    @rule(job_id=ids)
    def ask_cancel(self, job_id: str) -> None:
        def expected(kept: Kept) -> Kept | None:
            if kept.finished:
                return None
            return kept.ended("cancelled", self.clock) if kept.owner is None else replace(kept, wanted=False)

        self.change(job_id, None, lambda job: job.ask_cancel(self.clock, RETENTION_S), expected)

    @rule(job_id=ids, instance=INSTANCES)
    def hand_back(self, job_id: str, instance: str) -> None:
        self.change(
            job_id,
            instance,
            lambda job: job.handed_back(),
            lambda kept: None if kept.finished else kept.now("queued", owner=None),
        )

    @rule(instance=INSTANCES)
    def renew(self, instance: str) -> None:
        held = self.ask(self.store.renew(instance, self.clock, LEASE_S))
        mine = [kept for kept in self.model.values() if kept.owner == instance]
        assert held.jobs == {kept.id for kept in mine}
        assert held.cancelled == {kept.id for kept in mine if not kept.wanted}
        for kept in mine:
            self.model[kept.id] = replace(kept, lease_until=self.clock + LEASE_S)

    @rule()
    def reclaim(self) -> None:
        lost = self.ask(self.store.reclaim(self.clock, lambda job: job.orphaned(LOST, self.clock, RETENTION_S)))
        over = [kept for kept in self.model.values() if kept.owner is not None and kept.lease_until <= self.clock]
        assert {job.id for job in lost} == {kept.id for kept in over}
        for kept in over:
            self.model[kept.id] = self.orphan(kept)

    def orphan(self, kept: Kept) -> Kept:
        if not kept.wanted:
            return kept.ended("cancelled", self.clock)
        if kept.status == "queued":
            return replace(kept, owner=None)
        if kept.attempt < 2:
            return kept.now("queued", owner=None, attempt=kept.attempt + 1)
        return kept.ended("failed", self.clock)

    @rule(job_id=consumes(ids))
    def remove(self, job_id: str) -> None:
        self.ask(self.store.remove(job_id))
        self.model.pop(job_id, None)

    @rule(seconds=st.sampled_from([1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds

    def change(self, job_id: str, instance: str | None, transition: Any, expected: Any) -> None:
        call = self.store.change(job_id, transition, instance=instance)
        kept = self.model.get(job_id)
        after = None if kept is None else expected(kept)
        if kept is None:
            with pytest.raises(NotFound):
                self.ask(call)
        elif instance is not None and kept.owner != instance:
            with pytest.raises(LeaseLost):
                self.ask(call)
        elif after is None:
            with pytest.raises(Transition):
                self.ask(call)
        else:
            self.ask(call)
            self.model[job_id] = after

    def line(self) -> list[Kept]:
        queued = (kept for kept in self.model.values() if kept.status == "queued")
        return sorted(queued, key=lambda kept: (-kept.priority, kept.number))

    @invariant()
    def shows_the_same(self) -> None:
        page = self.ask(self.store.page(None, 100, "asc"))
        assert [seen(job) for job in page.jobs] == [shown(kept) for kept in self.model.values()]
        mine = self.ask(self.store.page(None, 100, "desc", key="a")).jobs
        assert [job.id for job in mine] == [kept.id for kept in reversed(self.model.values()) if kept.key == "a"]
        places = self.ask(self.store.places(page.jobs))
        assert places == {kept.id: place for place, kept in enumerate(self.line(), start=1)}
        expired = {job.id for job in self.ask(self.store.expired(self.clock))}
        assert expired == {
            kept.id for kept in self.model.values() if kept.expires_at is not None and kept.expires_at <= self.clock
        }
        for kept in self.model.values():
            events = self.ask(self.store.events(kept.id))
            assert tuple(event.status for event in events) == kept.events
            assert [event.revision for event in events] == sorted({event.revision for event in events})


def seen(job: Job) -> tuple[object, ...]:
    return job.id, job.status, job.owner, job.attempt, job.priority, job.key, not job.cancel_requested


def shown(kept: Kept) -> tuple[object, ...]:
    return kept.id, kept.status, kept.owner, kept.attempt, kept.priority, kept.key, kept.wanted


@pytest.mark.parametrize(("kind", "examples"), [("memory", 40), ("sqlite", 6), ("postgres", 3)])
def test_a_store_does_what_its_model_does(kind: str, examples: int, request: pytest.FixtureRequest) -> None:
    server: PostgresServer | None = request.getfixturevalue("postgres") if kind == "postgres" else None

    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__()
            self.loop = asyncio.new_event_loop()
            self.folder = TemporaryDirectory()
            url = f"sqlite:///{self.folder.name}/jobs.db" if server is None else server.new_database()
            self.store = MemoryJobStore() if kind == "memory" else SqlJobStore(url)

        def teardown(self) -> None:
            self.ask(self.store.close())
            self.loop.close()
            self.folder.cleanup()

    many = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=many)
