"""The runner: order, look-ahead, cancel in every phase, retry, recovery, and that nothing is left behind."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from diffusion_service.encoder_client import EncoderAway
from diffusion_service.jobs.job import JobFailure
from shared_schema.errors import (
    ChecksumMismatch,
    InvalidRequest,
    JobFailed,
    NotFound,
    RankDied,
    RankFailed,
    SlabFull,
)
from tests.diffusion_service.jobs.stage import Stage

Scenario = Callable[[Stage], Awaitable[None]]


def play(root: Path, scenario: Scenario, *, running: bool = True) -> Stage:
    """A scenario beside a running runner; nothing is held and no stray file is left afterwards."""
    state = root / "state"
    state.mkdir()

    async def main() -> Stage:
        stage = Stage(state)
        work = asyncio.create_task(stage.runner.run()) if running else None
        await scenario(stage)
        if work is not None:
            work.cancel()
            await asyncio.wait([work])
        assert stage.handover.held == set()
        assert stage.engine.at_work == []
        stage.artifacts.close()
        return stage

    return asyncio.run(main())


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


def test_a_start_removes_inputs_that_a_killed_service_had_no_time_to_remove(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job, waiting = await stage.add(), await stage.add()
        await stage.store.change(job, lambda each: each.start(1.0).fail(JobFailure(code="timeout", message=""), 1.0, 9))
        await stage.runner.recover()
        assert [path.parent.name for path in stage.files()] == [waiting]

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


def test_waiting_for_a_job_ends_with_the_job_or_with_the_time(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        job = await stage.add()
        assert await stage.runner.wait(job, 0.05) is None
        stage.open()
        done = await stage.runner.wait(job, 5)
        assert done is not None
        assert done.status == "completed"

    play(tmp_path, scenario)


def test_draining_finishes_the_running_job_and_admits_none(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second, third = [await stage.add() for _ in range(3)]
        await stage.until(lambda: first in stage.engine.at_work)
        draining = asyncio.create_task(stage.runner.drain(5))
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
