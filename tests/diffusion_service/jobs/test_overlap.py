"""One job's file is finished while the next job is made: order, bounds, progress, and every end of either."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion_service.jobs.conduct import Conduct
from diffusion_service.jobs.progress import Stage as Reached
from shared_schema.errors import JobFailed, RankDied
from tests.diffusion_service.jobs.stage import LATEST_S, RULES, Stage, play


async def overlapping(stage: Stage, *, more: int = 0) -> list[str]:
    """The first job's file is held, the second job denoises, and `more` jobs wait behind them."""
    stage.handover.gate.set()
    jobs = [await stage.add() for _ in range(2)]
    await stage.until(lambda: jobs[1] in stage.handover.held)
    stage.engine.mux.clear()
    stage.engine.gate.set()
    await stage.until(lambda: stage.engine.at_work == jobs)
    await stage.until(in_phase(stage, jobs[0], "muxing"))
    await stage.until(in_phase(stage, jobs[1], "denoising"))
    return jobs + [await stage.add() for _ in range(more)]


def in_phase(stage: Stage, job_id: str, phase: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        job = await stage.job(job_id)
        return (job.status, job.phase) == ("in_progress", phase)

    return look


def test_the_next_job_denoises_while_the_file_of_the_last_one_is_finished(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second = await overlapping(stage)
        assert stage.runner.step(await stage.job(first)) is None
        assert stage.runner.step(await stage.job(second)) == 0
        stage.engine.mux.set()
        done = await stage.final(first)
        assert (done.status, done.attempt) == ("completed", 1)
        assert stage.artifacts.clip(first).read_bytes() == b"clip"
        assert (await stage.job(second)).phase == "denoising"
        stage.engine.gate.set()
        assert (await stage.final(second)).status == "completed"
        assert stage.files() == []

    play(tmp_path, scenario)


@contextmanager
def gate_closed_after(stage: Stage, job_id: str, phase: Reached, done: int, output: int) -> Iterator[Conduct]:
    """The job stops once it has reached that."""
    conduct = stage.runner._line.find(job_id)
    assert conduct is not None
    reached = conduct._reached

    def holding(now: Reached, parts: int, of: int, index: int) -> None:
        reached(now, parts, of, index)
        if (now, parts, index) == (phase, done, output):
            stage.engine.gate.clear()

    conduct._reached = holding  # type: ignore[method-assign]
    yield conduct
    conduct._reached = reached  # type: ignore[method-assign]


def test_of_several_outputs_only_the_last_file_is_finished_beside_the_next_job(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second = await stage.add(outputs=2), await stage.add()
        await stage.until(lambda: second in stage.handover.held)
        with gate_closed_after(stage, first, "muxing", 0, 0):
            stage.engine.gate.set()
            await stage.until(in_phase(stage, first, "muxing"))
            await asyncio.sleep(0.05)
            assert stage.engine.at_work == [first]
        stage.engine.gate.set()
        for each in (first, second):
            assert (await stage.final(each)).status == "completed"

    play(tmp_path, scenario)


def test_muxing_is_shown_when_it_is_heard_of_together_with_the_last_chunk(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.engine.pauses = False
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: stage.engine.at_work)
        with gate_closed_after(stage, job, "decoding", 1, 0) as conduct:
            stage.engine.mux.clear()
            stage.engine.gate.set()
            await stage.until(in_phase(stage, job, "decoding"))
            await stage.until(lambda: conduct._writer is not None and conduct._writer.done())
        stage.engine.gate.set()
        await stage.until(in_phase(stage, job, "muxing"))
        stage.engine.mux.set()
        assert (await stage.final(job)).status == "completed"

    play(tmp_path, scenario)


def test_a_third_job_waits_until_two_have_their_files_and_is_encoded_meanwhile(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second, third = await overlapping(stage, more=1)
        await stage.until(lambda: third in stage.handover.held)
        stage.engine.gate.set()
        await stage.until(in_phase(stage, second, "muxing"))
        await asyncio.sleep(0.05)
        assert stage.engine.at_work == [first, second]
        assert (await stage.job(third)).status == "queued"
        stage.engine.mux.set()
        stage.engine.gate.set()
        ends = [await stage.final(each) for each in (first, second, third)]
        assert [each.status for each in ends] == ["completed"] * 3

    play(tmp_path, scenario)


def test_jobs_complete_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second = await overlapping(stage)
        publish, go = stage.artifacts.publish, threading.Event()
        published: list[str] = []

        def held(job_id: str, count: int = 1) -> None:
            assert job_id != first or go.wait(LATEST_S)
            published.append(job_id)
            publish(job_id, count)

        stage.artifacts.publish = held  # type: ignore[method-assign]
        stage.engine.mux.set()
        stage.engine.gate.set()
        await stage.until(lambda: stage.engine.at_work == [])
        await asyncio.sleep(0.05)
        assert (await stage.job(second)).status == "in_progress"
        go.set()
        for each in (first, second):
            assert (await stage.final(each)).status == "completed"
        assert published == [first, second]

    play(tmp_path, scenario)


def test_an_urgent_job_goes_before_the_waiting_ones_and_behind_both_that_have_begun(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second, third = await overlapping(stage, more=1)
        urgent = await stage.add(priority=9)
        await stage.until(lambda: urgent in stage.handover.held)
        stage.engine.mux.set()
        stage.engine.gate.set()
        for each in (first, second, third, urgent):
            assert (await stage.final(each)).status == "completed"
        assert stage.engine.made == [first, second, urgent, third]

    play(tmp_path, scenario)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_cancel_of_either_job_leaves_the_other_as_it_is(tmp_path: Path, victim: int) -> None:
    async def scenario(stage: Stage) -> None:
        jobs = await overlapping(stage)
        other = jobs[1 - victim]
        assert (await stage.runner.cancel(jobs[victim])).status == "cancelled"
        assert stage.engine.at_work == [other]
        assert (await stage.job(other)).status == "in_progress"
        stage.engine.mux.set()
        stage.engine.gate.set()
        done = await stage.final(other)
        assert (done.status, done.attempt) == ("completed", 1)
        assert not stage.artifacts.clip(jobs[victim]).exists()
        assert stage.files() == []

    play(tmp_path, scenario)


def test_a_file_that_cannot_be_written_fails_its_own_job(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second = await overlapping(stage)
        stage.engine.mux_errors.append(JobFailed("the MP4 could not be written", code="internal_error"))
        stage.engine.mux.set()
        failed = await stage.final(first)
        assert failed.error is not None
        assert (failed.status, failed.error.code, failed.attempt) == ("failed", "internal_error", 1)
        stage.engine.gate.set()
        done = await stage.final(second)
        assert (done.status, done.attempt) == ("completed", 1)
        assert stage.files() == []

    play(tmp_path, scenario)


def test_a_group_that_dies_under_both_jobs_gives_each_its_second_attempt(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second = await overlapping(stage)
        stage.engine.mux_errors += [RankDied("gone"), RankDied("gone")]
        stage.engine.mux.set()
        stage.engine.gate.set()
        for each in (first, second):
            done = await stage.final(each)
            assert (done.status, done.attempt) == ("completed", 2)
        assert stage.files() == []

    play(tmp_path, scenario)


def test_a_file_that_takes_too_long_is_a_timeout_of_its_job(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second = await overlapping(stage)
        late = await stage.final(first)
        assert late.error is not None
        assert (late.status, late.error.code) == ("failed", "timeout")
        stage.engine.mux.set()
        stage.engine.gate.set()
        await stage.final(second)

    play(tmp_path, scenario, replace(RULES, job_timeout_s=0.5))


def test_a_drain_lets_both_finish_and_hands_back_the_one_behind(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        first, second, third = await overlapping(stage, more=1)
        await stage.until(lambda: third in stage.handover.held)
        draining = asyncio.create_task(stage.runner.drain(LATEST_S))
        await stage.until(lambda: third not in stage.handover.held)
        stage.engine.mux.set()
        stage.engine.gate.set()
        await draining
        assert [(await stage.job(each)).status for each in (first, second, third)] == [
            "completed",
            "completed",
            "queued",
        ]

    play(tmp_path, scenario)


def test_a_service_that_stops_puts_both_back(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        work = asyncio.create_task(stage.runner.run())
        jobs = await overlapping(stage)
        work.cancel()
        await asyncio.wait([work])
        for each in jobs:
            job = await stage.job(each)
            assert (job.status, job.owner, job.attempt, job.progress) == ("queued", None, 1, 0)
        assert stage.engine.at_work == []

    play(tmp_path, scenario, running=False)


def test_room_is_not_taken_from_a_job_whose_file_is_being_finished(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first = await stage.add()
        stage.engine.mux.clear()
        stage.engine.gate.set()
        await stage.until(in_phase(stage, first, "muxing"))
        stage.handover.no_room = True
        second = await stage.add()
        await stage.until(lambda: second in stage.handover.asked)
        await asyncio.sleep(0.02)
        assert stage.engine.at_work == [first]
        stage.handover.no_room = False
        stage.engine.mux.set()
        stage.engine.gate.set()
        for each in (first, second):
            done = await stage.final(each)
            assert (done.status, done.attempt) == ("completed", 1)
        assert stage.engine.made == [first, second]

    play(tmp_path, scenario)
