"""Leases, jobs of services that are gone, retention: what is done beside making jobs."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion_service.jobs import artifacts, upkeep
from diffusion_service.jobs.job import JobFailure
from shared_schema.errors import StorageUnavailable
from tests.diffusion_service.jobs.stage import RULES, Stage, play


@pytest.fixture(autouse=True)
def _rounds_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "PERIOD_S", 0.01)


def test_after_a_crash_running_jobs_begin_again_once_and_stray_files_go(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job, queued = await stage.add(), await stage.add()
        await stage.store.change(job, lambda each: each.start(1.0))
        stage.artifacts.part(job).write_bytes(b"half")
        stage.artifacts.open_upload().file("0").write_bytes(b"lost")
        await stage.runner.recover()
        assert (await stage.job(job)).attempt == 2
        assert [p.name for p in stage.files()] == ["0", "0"]
        await stage.store.change(job, lambda each: each.start(2.0))
        await stage.fresh_runner().recover()
        failed = await stage.job(job)
        assert failed.error is not None
        assert (failed.status, failed.error.code) == ("failed", "worker_died")
        assert (await stage.job(queued)).status == "queued"

    play(tmp_path, scenario, running=False)


def test_what_a_killed_service_left_on_a_shared_shelf_goes_while_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SWEEP_S", 0.05)
    monkeypatch.setattr(artifacts, "SHARED_STRAY_S", 0.0)

    async def scenario(stage: Stage) -> None:
        monkeypatch.setattr(type(stage.store), "shared", True)
        waiting, stray = await stage.add(), f"video_{'e' * 32}"
        upload = stage.artifacts.open_upload()
        upload.file("0").write_bytes(b"lost")
        stage.artifacts.claim(upload, stray)
        while stray in {path.parent.name for path in stage.files()}:
            await asyncio.sleep(0.01)
        assert waiting in {path.parent.name for path in stage.files()}

    play(tmp_path, scenario)


def test_a_start_removes_inputs_that_a_killed_service_had_no_time_to_remove(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job, waiting = await stage.add(), await stage.add()
        await stage.store.change(job, lambda each: each.start(1.0).fail(JobFailure(code="timeout", message=""), 1.0, 9))
        await stage.runner.recover()
        assert [path.parent.name for path in stage.files()] == [waiting]

    play(tmp_path, scenario, running=False)


def test_a_start_removes_a_clip_that_was_published_and_never_written_down(tmp_path: Path) -> None:
    """A service was killed between the two; the job is made again, and may fail this time."""

    async def scenario(stage: Stage) -> None:
        job = await stage.add()
        await stage.store.change(job, lambda each: each.start(1.0))
        stage.artifacts.part(job).write_bytes(b"clip")
        stage.artifacts.publish(job)
        await stage.runner.recover()
        assert (await stage.job(job)).status == "queued"
        assert not stage.artifacts.clip(job).exists()

    play(tmp_path, scenario, running=False)


def test_record_and_file_of_a_job_expire_together(tmp_path: Path) -> None:
    # cases 3 and 9
    async def scenario(stage: Stage) -> None:
        stage.open()
        job = await stage.final(await stage.add())
        stage.now += 61
        await stage.until(lambda: not stage.artifacts.clip(job.id).exists())
        await stage.until(lambda: _is_gone(stage, job.id))

    play(tmp_path, scenario)


async def _is_gone(stage: Stage, job_id: str) -> bool:
    return await stage.store.get(job_id) is None


def test_a_job_that_another_service_took_is_let_go_within_a_round(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: job in stage.engine.at_work)
        failure = JobFailure(code="worker_died", message="silent for too long")
        (taken,) = await stage.store.reclaim(math.inf, lambda each: each.orphaned(failure, 1.0, 60.0))
        assert (taken.status, taken.attempt) == ("queued", 2)
        await stage.store.claim("another", stage.now, 1e9, lambda waiting, _: waiting[0].id)
        await stage.until(lambda: job not in stage.engine.at_work)
        await asyncio.sleep(0.05)
        kept = await stage.job(job)
        assert (kept.owner, kept.status, kept.attempt) == ("another", "queued", 2), "the new owner was not disturbed"
        assert stage.artifacts.input(job, "0").exists()

    play(tmp_path, scenario)


def test_a_wish_to_cancel_that_came_to_another_service_arrives(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: job in stage.engine.at_work)
        other = stage.fresh_runner()
        assert (await other.cancel(job)).status == "cancelled"
        assert job not in stage.engine.at_work
        await stage.until(lambda: not stage.files())

    play(tmp_path, scenario)


def test_whoever_waits_for_another_service_to_cancel_asks_once_and_again_when_it_gives_the_job_back(
    tmp_path: Path,
) -> None:
    async def scenario(stage: Stage) -> None:
        job = await stage.add()
        await stage.store.claim("another", stage.now, 1e9, lambda waiting, _: waiting[0].id)
        changed: list[str] = []
        stage.store._tell = changed.append
        cancelling = asyncio.create_task(stage.runner.cancel(job))
        await asyncio.sleep(0.35)
        assert (await stage.job(job)).cancel_requested
        assert changed == [job], "waiting writes nothing"
        await stage.store.change(job, lambda each: each.handed_back(), instance="another")
        assert (await cancelling).status == "cancelled"
        assert stage.files() == []

    play(tmp_path, scenario, running=False)


def test_jobs_of_a_service_that_is_gone_begin_again_elsewhere(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job = await stage.add()
        await stage.store.claim("gone", stage.now, 5, lambda waiting, _: waiting[0].id)
        await stage.store.change(job, lambda each: each.start(1.0))
        work = asyncio.create_task(stage.runner.run())
        stage.open()
        await asyncio.sleep(0.05)
        assert (await stage.job(job)).owner == "gone"
        stage.now += 6
        done = await stage.final(job)
        assert (done.status, done.attempt) == ("completed", 2)
        work.cancel()
        await asyncio.wait([work])

    play(tmp_path, scenario, running=False)


def test_a_database_that_is_away_fails_no_job_and_ends_no_service(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job, following = await stage.add(), await stage.add()
        await stage.until(lambda: job in stage.engine.at_work and following in stage.handover.held)
        back = stage.store_away()
        stage.engine.gate.set()
        await asyncio.sleep(0.1)
        back()
        for each in (job, following):
            done = await stage.final(each)
            assert (done.status, done.attempt) == ("completed", 1)

    play(tmp_path, scenario)


def test_what_is_not_renewed_in_time_is_let_go(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: job in stage.engine.at_work)
        back = stage.store_away()
        await stage.until(lambda: job not in stage.engine.at_work)
        back()
        stage.engine.gate.set()
        done = await stage.final(job)
        assert (done.status, done.attempt) == ("completed", 1), "nobody else took it meanwhile"

    play(tmp_path, scenario, replace(RULES, lease_s=0.1))


def test_a_store_of_clips_that_is_away_ends_neither_the_service_nor_the_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "AWAY_S", 0.01)

    async def scenario(stage: Stage) -> None:
        stage.open()
        old = await stage.final(await stage.add())
        away = asyncio.Event()
        away.set()
        for name in ("remove", "drop_inputs"):
            monkeypatch.setattr(stage.artifacts, name, _refusing(away, getattr(stage.artifacts, name)))
        stage.now += 61
        job = await stage.final(await stage.add())
        assert job.status == "completed"
        assert stage.registry.get_sample_value("h3_jobs_ended_total", {"task": "t2va", "status": "completed"}) == 2
        await asyncio.sleep(0.1)
        assert await stage.store.get(old.id) is not None, "its files are still there"
        away.clear()
        stage.now += 61
        for each in (old, job):
            await stage.until(lambda each=each: _is_gone(stage, each.id))

    play(tmp_path, scenario)


def _refusing(away: asyncio.Event, call: Callable[[str], None]) -> Callable[[str], None]:
    def refuse(job_id: str) -> None:
        if away.is_set():
            raise StorageUnavailable("the object store is away")
        call(job_id)

    return refuse


def test_a_job_that_is_lost_at_its_last_word_leaves_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PERIOD_S", 600.0)

    async def scenario(stage: Stage) -> None:
        dropped: list[str] = []
        drop = stage.artifacts.drop_part
        monkeypatch.setattr(stage.artifacts, "drop_part", lambda job_id: (dropped.append(job_id), drop(job_id)))
        stage.engine.mux.clear()
        stage.open()
        job = await stage.add()
        await stage.until(lambda: job in stage.engine.at_work and not stage.engine.gate.is_set())
        failure = JobFailure(code="worker_died", message="silent for too long")
        await stage.store.reclaim(math.inf, lambda each: each.orphaned(failure, 1.0, 60.0))
        await stage.store.claim("another", stage.now, 1e9, lambda waiting, _: waiting[0].id)
        stage.engine.mux.set()
        await stage.until(lambda: job in dropped)
        stage.artifacts.remove(job)

    play(tmp_path, scenario)
