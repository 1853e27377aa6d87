"""The runner: order, look-ahead, cancel in every phase, retry, drain, and that nothing is left behind."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion_service.jobs import runner
from shared_schema.errors import (
    ChecksumMismatch,
    EncoderAway,
    InvalidRequest,
    JobFailed,
    NotFound,
    RankDied,
    RankFailed,
    SlabFull,
)
from tests.diffusion_service.jobs.stage import LATEST_S, RULES, Stage, play


def test_a_job_completes_with_its_file_digest_and_stage_times(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        job = await stage.final(await stage.add())
        assert (job.status, job.progress, job.attempt) == ("completed", 100, 1)
        assert job.stage_durations == {"encode": 0.5, "denoise": 1.0}
        assert job.result is not None
        assert job.result.outputs[0].frames_sha256 == "f" * 64
        assert stage.artifacts.clip(job.id).read_bytes() == b"clip"
        assert stage.files() == []

    play(tmp_path, scenario)


def test_progress_visits_the_phases_and_never_falls(tmp_path: Path) -> None:
    # case 20
    async def scenario(stage: Stage) -> None:
        seen: list[tuple[str, int]] = []
        change = stage.store.change

        async def noting(job_id: str, transition, **fence):  # type: ignore[no-untyped-def]
            job = await change(job_id, transition, **fence)
            seen.append((job.phase, job.progress))
            return job

        stage.store.change = noting  # type: ignore[method-assign]
        stage.open()
        await stage.final(await stage.add())
        progress = [value for _, value in seen]
        assert progress == sorted(progress)
        phases = list(dict.fromkeys(phase for phase, _ in seen))
        assert phases[-1] == "muxing"
        assert {"denoising", "decoding"} <= set(phases)
        assert progress[-1] == 100
        assert progress[-2] < 100

    play(tmp_path, scenario)


def test_one_job_is_in_progress_and_the_next_is_encoded_while_it_shows_as_queued(tmp_path: Path) -> None:
    # case 1
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second, third = [await stage.add() for _ in range(3)]
        await stage.until(lambda: second in stage.handover.held)
        await stage.until(lambda: _has_status(stage, first, "in_progress"))
        assert [(await stage.job(each)).status for each in (first, second, third)] == [
            "in_progress",
            "queued",
            "queued",
        ]
        assert stage.handover.asked == [first, second]
        stage.engine.gate.set()
        for each in (first, second, third):
            assert (await stage.final(each)).status == "completed"
        assert stage.handover.asked == [first, second, third]

    play(tmp_path, scenario)


@pytest.mark.parametrize("phase", ["encoding", "waiting", "denoising"])
def test_cancel_stops_the_work_frees_the_landing_and_lets_the_next_job_go_on(tmp_path: Path, phase: str) -> None:
    # cases 1 and 46
    async def scenario(stage: Stage) -> None:
        first = await stage.add()
        second = await stage.add()
        if phase == "encoding":
            await stage.until(lambda: first in stage.handover.asked)
            victim = first
        else:
            stage.handover.gate.set()
            await stage.until(lambda: first in stage.engine.at_work and second in stage.handover.held)
            victim = first if phase == "denoising" else second
        job = await stage.runner.cancel(victim)
        assert job.status == "cancelled"
        assert victim not in stage.engine.at_work
        assert victim not in stage.handover.held
        assert (await stage.runner.cancel(victim)).status == "cancelled"
        stage.open()
        other = second if victim == first else first
        assert (await stage.final(other)).status == "completed"
        assert stage.files() == []

    play(tmp_path, scenario)


def test_a_queued_job_that_is_cancelled_never_reaches_the_encoder(tmp_path: Path) -> None:
    # case 1
    async def scenario(stage: Stage) -> None:
        jobs = [await stage.add() for _ in range(3)]
        await stage.until(lambda: stage.handover.asked)
        assert (await stage.runner.cancel(jobs[2])).status == "cancelled"
        stage.open()
        for each in jobs[:2]:
            await stage.final(each)
        assert jobs[2] not in stage.handover.asked
        assert stage.files() == []

    play(tmp_path, scenario)


def test_removing_a_running_job_forgets_record_and_files(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: job in stage.engine.at_work)
        await stage.runner.remove(job)
        assert await stage.store.get(job) is None
        assert stage.files() == []
        with pytest.raises(NotFound):
            await stage.runner.remove(job)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("bad file", param="input_references[0]"), "invalid_input"),
        (EncoderAway("gone"), "encoder_unavailable"),
        (RankFailed("boom", code="out_of_memory"), "out_of_memory"),
        (JobFailed("nan", code="numerical_error"), "numerical_error"),
        (ZeroDivisionError("bug"), "internal_error"),
    ],
)
def test_a_failure_is_typed_and_not_retried(tmp_path: Path, error: Exception, code: str) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        stage.handover.errors.append(error)
        job = await stage.final(await stage.add())
        assert job.error is not None
        assert (job.status, job.error.code, job.attempt) == ("failed", code, 1)
        assert job.error.param == getattr(error, "param", None)
        assert (await stage.final(await stage.add())).status == "completed"
        assert stage.files() == []

    play(tmp_path, scenario)


def test_jobs_that_end_at_once_are_never_lost_between_store_and_runner(tmp_path: Path) -> None:
    # case 7
    async def scenario(stage: Stage) -> None:
        stage.open()
        stage.handover.errors += [InvalidRequest("bad file")] * 160
        ids: list[str] = []

        async def add_some() -> None:
            for _ in range(4):
                ids.append(await stage.add())
                await asyncio.sleep(0)

        await asyncio.gather(*(add_some() for _ in range(50)))
        statuses = [(await stage.final(job_id)).status for job_id in ids]
        assert (len(statuses), statuses.count("failed"), statuses.count("completed")) == (200, 160, 40)

    play(tmp_path, scenario)


@pytest.mark.parametrize("error", [RankDied("gone"), ChecksumMismatch("bits"), SlabFull("full")])
def test_a_dead_rank_or_a_broken_transfer_is_retried_once(tmp_path: Path, error: Exception) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        stage.handover.errors.append(error)
        job = await stage.final(await stage.add())
        assert (job.status, job.attempt) == ("completed", 2)
        stage.handover.errors += [error, error]
        job = await stage.final(await stage.add())
        assert job.error is not None
        assert (job.status, job.attempt) == ("failed", 2)
        assert job.error.code in ("worker_died", "transfer_failed")

    play(tmp_path, scenario)


def test_a_rank_that_dies_while_the_clip_is_made_is_retried_from_the_start(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        stage.engine.errors.append(RankDied("gone"))
        job = await stage.final(await stage.add())
        assert (job.status, job.attempt) == ("completed", 2)
        assert len(stage.handover.asked) == 2

    play(tmp_path, scenario)


def test_a_stopped_service_puts_its_jobs_back_as_if_they_had_not_begun(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        work = asyncio.create_task(stage.runner.run())
        await stage.until(lambda: job in stage.engine.at_work)
        work.cancel()
        await asyncio.wait([work])
        kept = await stage.job(job)
        assert (kept.status, kept.attempt, kept.progress) == ("queued", 1, 0)
        assert stage.artifacts.input(job, "0").exists()

    play(tmp_path, scenario, running=False)


def test_waiting_for_a_job_ends_with_the_job_or_with_the_time(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job = await stage.add()
        assert await stage.runner.wait(job, 0.05) is None
        stage.open()
        done = await stage.runner.wait(job, LATEST_S)
        assert done is not None
        assert done.status == "completed"

    play(tmp_path, scenario)


def test_draining_finishes_the_running_job_and_admits_none(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second, third = [await stage.add() for _ in range(3)]
        await stage.until(lambda: first in stage.engine.at_work)
        draining = asyncio.create_task(stage.runner.drain(LATEST_S))
        await asyncio.sleep(0.01)
        stage.engine.gate.set()
        await draining
        assert (await stage.job(first)).status == "completed"
        assert (await stage.job(third)).status == "queued"
        del second

    play(tmp_path, scenario)


def test_two_hundred_jobs_cancelled_at_random_leave_a_runner_that_works(tmp_path: Path) -> None:
    # case 2
    async def scenario(stage: Stage) -> None:
        stage.open()
        chance = random.Random(7)
        for _ in range(200):
            job = await stage.add()
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
            await stage.runner.remove(job)
        assert (await stage.final(await stage.add())).status == "completed"
        assert stage.files() == []

    play(tmp_path, scenario)


def test_a_job_of_a_higher_priority_is_made_before_those_that_are_encoded_ahead(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second, third = [await stage.add() for _ in range(3)]
        await stage.until(lambda: first in stage.engine.at_work and second in stage.handover.held)
        urgent = await stage.add(priority=5)
        await stage.until(lambda: urgent in stage.handover.held)
        await stage.until(lambda: second not in stage.handover.held)
        assert (await stage.job(second)).status == "queued"
        assert stage.runner.eta(await stage.job(second), 2) is None, "nothing was measured yet"
        stage.engine.gate.set()
        for each in (first, urgent, second, third):
            assert (await stage.final(each)).attempt == 1
        assert stage.engine.made == [first, urgent, second, third]

    play(tmp_path, scenario)


def test_what_has_begun_is_not_overtaken(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first = await stage.add()
        await stage.until(lambda: _has_status(stage, first, "in_progress"))
        urgent = await stage.add(priority=100)
        await stage.until(lambda: urgent in stage.handover.asked)
        assert (await stage.job(urgent)).status == "queued"
        stage.open()
        await stage.final(urgent)
        assert stage.engine.made == [first, urgent]

    play(tmp_path, scenario)


async def _has_status(stage: Stage, job_id: str, status: str) -> bool:
    return (await stage.job(job_id)).status == status


def test_keys_share_the_service(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        many = [await stage.add(key="a") for _ in range(4)]
        one = await stage.add(key="b")
        stage.open()
        for each in (*many, one):
            await stage.final(each)
        assert stage.engine.made.index(one) <= 2

    play(tmp_path, scenario)


def test_a_key_has_no_more_jobs_under_way_than_it_may(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second, other = await stage.add(key="a"), await stage.add(key="a"), await stage.add(key="b")
        await stage.until(lambda: other in stage.handover.held)
        assert second not in stage.handover.asked
        stage.engine.gate.set()
        await stage.final(second)
        assert stage.engine.made == [first, other, second]

    play(tmp_path, scenario, replace(RULES, running_per_key=1))


def test_a_first_job_without_room_gets_that_of_the_last_one_encoded_ahead(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        running, ahead = await stage.add(), await stage.add()
        await stage.until(lambda: running in stage.engine.at_work and ahead in stage.handover.held)
        stage.handover.no_room = True
        urgent = await stage.add(priority=1)
        await stage.until(lambda: urgent in stage.handover.asked)
        await stage.runner.cancel(running)
        await stage.until(lambda: ahead not in stage.handover.held)
        await stage.add()
        await asyncio.sleep(0.05)
        assert stage.handover.asked == [running, ahead, urgent], "while a push waits for room nothing more is encoded"
        stage.handover.no_room = False
        stage.engine.gate.set()
        for each in (urgent, ahead):
            assert (await stage.final(each)).status == "completed"
        assert stage.engine.made[:3] == [running, urgent, ahead]

    play(tmp_path, scenario, replace(RULES, look_ahead=2))


def test_a_drain_hands_back_what_does_not_finish_in_time(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second, third = [await stage.add() for _ in range(3)]
        await stage.until(lambda: first in stage.engine.at_work and second in stage.handover.held)
        await stage.runner.drain(0.05)
        for each in (first, second, third):
            job = await stage.job(each)
            assert (job.status, job.owner, job.attempt, job.progress) == ("queued", None, 1, 0)
            assert stage.artifacts.input(each, "0").exists()
        assert stage.handover.held == set()

    play(tmp_path, scenario)


def test_a_drain_does_not_wait_for_a_database_that_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PARTING_S", 0.05)

    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: _has_status(stage, job, "in_progress"))
        back = stage.store_away()
        stage.engine.gate.set()
        await stage.until(lambda: not stage.engine.at_work)
        await stage.until(lambda: stage.artifacts.clip(job).exists())
        async with asyncio.timeout(10):
            await stage.runner.drain(0.05)
        back()
        assert (await stage.final(job)).status == "completed"

    play(tmp_path, scenario)


def test_the_step_is_known_while_a_job_is_denoised_and_only_then(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job, ahead = await stage.add(), await stage.add()
        assert stage.runner.step(await stage.job(job)) is None
        stage.handover.gate.set()
        await stage.until(lambda: stage.engine.at_work)
        await stage.until(lambda: _has_status(stage, job, "in_progress"))
        assert stage.runner.step(await stage.job(job)) == 0
        assert stage.runner.step(await stage.job(ahead)) is None
        stage.open()
        assert stage.runner.step(await stage.final(job)) is None

    play(tmp_path, scenario)


def test_how_long_jobs_take_is_known_after_the_first_one_and_after_a_restart(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job = await stage.add()
        assert stage.runner.eta(await stage.job(job), 1) is None
        stage.handover.gate.set()
        await stage.until(lambda: _has_status(stage, job, "in_progress"))
        stage.now += 10
        stage.engine.gate.set()
        done = await stage.final(job)
        assert stage.runner.eta(done) is None
        waiting = (await stage.job(job)).model_copy(update={"status": "queued"})
        first, third = stage.runner.eta(waiting, 1), stage.runner.eta(waiting, 3)
        assert first is not None
        assert third is not None
        assert third > first > 0
        again = stage.fresh_runner()
        await again.recover()
        assert again.eta(waiting, 1) == first

    play(tmp_path, scenario)
