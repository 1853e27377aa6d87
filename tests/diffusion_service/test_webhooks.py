"""The end of a job reaches its receiver: signed, at least once, over refusals, restarts and several services."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from diffusion_service import webhooks
from diffusion_service.accounts import WebhookAccounts
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.sql.store import SqlJobStore
from diffusion_service.jobs.webhook import Webhook
from diffusion_service.outbound import PinnedClient
from diffusion_service.signature import Signer
from diffusion_service.webhooks import Webhooks
from shared_schema.deploy.service import AllowedHost
from shared_schema.errors import StoreUnavailable
from tests.diffusion_service.jobs.made import completed, failed, new_job
from tests.diffusion_service.receiver import SECRET, Receiver, receiving

LOCAL = AllowedHost(host="127.0.0.1", private=True)


@dataclass
class Bench:
    """A store, and as many services on it as the test starts."""

    folder: Path
    receiver: Receiver
    now: float = 1_000_000.0
    hosts: tuple[AllowedHost, ...] = (LOCAL,)
    timeout_s: float = 5.0
    attempts: int = 3
    database: str | None = None
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    opened: list[tuple[SqlJobStore, PinnedClient]] = field(default_factory=list)

    def open(self) -> SqlJobStore:
        # A SQLite store is one process's alone.
        store = self.opened[0][0] if self.opened and self.database is None else self._opened()
        self.opened.append((store, PinnedClient(self.hosts)))
        return store

    def _opened(self) -> SqlJobStore:
        return SqlJobStore(self.database or f"sqlite:///{self.folder / 'jobs.db'}")

    def start(self) -> asyncio.Task[None]:
        """One more service that delivers."""
        store, client = self.open(), self.opened[-1][1]
        secret = self.folder / "secret"
        secret.write_text(SECRET)
        service = Webhooks(
            store,
            client.post,
            Signer.read(secret),
            WebhookAccounts(CollectorRegistry() if self.opened[1:] else self.registry),
            timeout_s=self.timeout_s,
            attempts=self.attempts,
            clock=self.time,
            draw=lambda: 1.0,
        )
        return asyncio.create_task(service.run())

    def time(self) -> float:
        return self.now

    async def ended(self, store: SqlJobStore, end: Callable[[Job], Job] = completed, number: int = 0) -> Job:
        """A job with a webhook that has just ended."""
        job = await store.add(new_job(number, self.receiver.url), limit=99)
        await store.change(job.id, end)
        # Made jobs end at a time of their own; the message is due by the clock of this bench.
        return await store.change(job.id, lambda kept: kept.hooked(lambda hook: hook.due(self.now)))

    async def until(self, store: SqlJobStore, job_id: str, condition: Callable[[Webhook], bool]) -> Webhook:
        while True:
            job = await store.get(job_id)
            assert job is not None
            assert job.webhook is not None
            if condition(job.webhook):
                return job.webhook
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for _, client in self.opened:
            await client.close()
        for store in {id(store): store for store, _ in self.opened}.values():
            await store.close()


Body = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(webhooks, "POLL_S", 0.01)

    def running(body: Body, **settings: object) -> None:
        async def limited() -> None:
            with receiving() as receiver:
                bench = Bench(tmp_path, receiver, **settings)  # type: ignore[arg-type]
                try:
                    async with asyncio.timeout(90):
                        await body(bench)
                finally:
                    for task in asyncio.all_tasks() - {asyncio.current_task()}:
                        task.cancel()
                    await asyncio.sleep(0)
                    await bench.close()

        asyncio.run(limited())

    return running


@pytest.mark.parametrize(("end", "kind"), [(completed, "video.completed"), (failed, "video.failed")])
def test_the_end_of_a_job_is_told_signed_and_noted(
    run: Callable[..., None], end: Callable[[Job], Job], kind: str
) -> None:
    async def body(bench: Bench) -> None:
        store = bench.open()
        bench.now = time.time()
        job = await bench.ended(store, end)
        bench.start()
        hook = await bench.until(store, job.id, lambda hook: hook.state == "delivered")
        assert (hook.attempts, hook.last_status, hook.due_at, hook.last_error) == (1, 204, None, None)
        [message] = bench.receiver.messages
        event = message.event()
        assert (message.path, message.headers["content-type"]) == ("/hook", "application/json")
        assert (event["type"], event["created_at"], event["data"]["id"]) == (kind, 1002, job.id)
        assert event["data"]["status"] == kind.removeprefix("video.")
        await asyncio.sleep(0.05)
        assert len(bench.receiver.messages) == 1

    run(body)


def test_a_job_that_goes_on_is_not_told_nor_one_without_a_webhook(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        store = bench.open()
        await store.add(new_job(1, bench.receiver.url), limit=9)
        plain = await store.add(new_job(2), limit=9)
        await store.change(plain.id, completed)
        bench.start()
        await asyncio.sleep(0.1)
        assert bench.receiver.messages == []

    run(body)


def test_success_is_any_status_of_the_two_hundreds_and_no_other(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.statuses = [300, 299]
        store = bench.open()
        job = await bench.ended(store)
        bench.start()
        refused = await bench.until(store, job.id, lambda hook: hook.last_status == 300)
        assert (refused.state, refused.last_error) == ("pending", "the receiver answered 300")
        bench.now += 5
        assert (await bench.until(store, job.id, lambda hook: hook.last_status == 299)).state == "delivered"

    run(body)


def test_a_database_that_was_away_for_a_moment_keeps_no_message_back(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        store = bench.open()
        job, due = await bench.ended(store), store.due_webhooks

        async def away(*_: object) -> list[Job]:
            store.due_webhooks = due  # type: ignore[method-assign]
            raise StoreUnavailable("the database is away")

        store.due_webhooks = away  # type: ignore[assignment]
        bench.start()
        await bench.until(store, job.id, lambda hook: hook.state == "delivered")

    run(body)


def test_a_refused_message_comes_again_with_the_same_id_and_body_after_its_delay(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.statuses = [500, 302, 200]
        bench.receiver.location = f"{bench.receiver.url}/elsewhere"
        store = bench.open()
        job = await bench.ended(store)
        bench.start()
        first = await bench.until(store, job.id, lambda hook: hook.last_status == 500)
        assert (first.state, first.due_at) == ("pending", bench.now + 5)
        await asyncio.sleep(0.05)
        assert len(bench.receiver.messages) == 1
        bench.now += 5
        second = await bench.until(store, job.id, lambda hook: hook.last_status == 302)
        assert (second.last_error, second.due_at) == ("the receiver answered 302", bench.now + 20)
        bench.now += 20
        await bench.until(store, job.id, lambda hook: hook.state == "delivered")
        messages = bench.receiver.messages
        assert {(message.path, message.id, message.body) for message in messages} == {
            ("/hook", messages[0].id, messages[0].body)
        }
        assert len(messages) == 3

    run(body)


def test_a_message_that_is_never_taken_is_given_up_and_the_job_says_why(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.statuses = [503]
        store = bench.open()
        job = await bench.ended(store)
        bench.start()
        for tries in range(1, 4):
            while len(bench.receiver.messages) < tries:
                await asyncio.sleep(0.01)
            await bench.until(store, job.id, lambda hook: hook.due_at != bench.now + bench.timeout_s + webhooks.GRACE_S)
            bench.now += 10_000
        hook = await bench.until(store, job.id, lambda hook: hook.state == "failed")
        assert (hook.attempts, hook.last_error, hook.due_at) == (3, "the receiver answered 503", None)

    run(body)


def test_a_receiver_that_answers_nothing_is_left_and_holds_up_nobody(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.statuses = [0, 204]
        store = bench.open()
        slow = await bench.ended(store, number=1)
        bench.start()
        while not bench.receiver.messages:
            await asyncio.sleep(0.01)
        other = await bench.ended(store, number=2)
        await bench.until(store, other.id, lambda hook: hook.state == "delivered")
        hook = await bench.until(store, slow.id, lambda hook: hook.last_error is not None)
        assert hook.state == "pending"
        assert "took more than 3 s" in (hook.last_error or "")

    run(body, timeout_s=3.0)


def test_an_address_that_is_not_allowed_any_more_is_not_dialled(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        store = bench.open()
        job = await bench.ended(store)
        bench.start()
        hook = await bench.until(store, job.id, lambda hook: hook.last_error is not None)
        assert (hook.last_status, bench.receiver.messages) == (None, [])

    run(body, hosts=(AllowedHost(host="127.0.0.1"),))


def test_a_message_outlives_the_service_that_tried_it(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.statuses = [0, 204]
        store = bench.open()
        job = await bench.ended(store)
        dying = bench.start()
        while not bench.receiver.messages:
            await asyncio.sleep(0.01)
        dying.cancel()
        bench.start()
        await asyncio.sleep(0.1)
        assert len(bench.receiver.messages) == 1, "it is in the hands of the first one still"
        bench.now += bench.timeout_s + webhooks.GRACE_S
        hook = await bench.until(store, job.id, lambda hook: hook.state == "delivered")
        assert hook.attempts == 2
        assert {message.id for message in bench.receiver.messages} == {bench.receiver.messages[0].id}

    run(body)


def test_services_that_share_a_store_deliver_each_message_once(run: Callable[..., None], postgres_url: str) -> None:
    async def body(bench: Bench) -> None:
        store = bench.open()
        jobs = [await bench.ended(store, number=number) for number in range(30)]
        for _ in range(3):
            bench.start()

        for job in jobs:
            await bench.until(store, job.id, lambda hook: hook.state == "delivered")
        ids = [message.id for message in bench.receiver.messages]
        assert len(ids) == len(set(ids)) == 30

    # No try is lost to a slow machine: it would come again, and count twice.
    run(body, database=postgres_url, timeout_s=60.0)


def test_a_job_that_is_deleted_meanwhile_ends_nothing(run: Callable[..., None]) -> None:
    async def body(bench: Bench) -> None:
        bench.receiver.statuses = [0, 204]
        store = bench.open()
        gone = await bench.ended(store, number=1)
        bench.start()
        while not bench.receiver.messages:
            await asyncio.sleep(0.01)
        await store.remove(gone.id)
        bench.receiver.let_go.set()
        other = await bench.ended(store, number=2)
        await bench.until(store, other.id, lambda hook: hook.state == "delivered")

    run(body)
