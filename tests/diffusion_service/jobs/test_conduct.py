"""One job under way: all its outputs, its time limit, and every race between its end and whoever stops it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion_service.jobs.public import video_of
from shared_runtime.metrics import exposition
from shared_schema.errors import NotFound, RankDied, RankFailed
from tests.diffusion_service.jobs.stage import RULES, Stage, play


@contextmanager
def publishing_held(stage: Stage) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Clips are published once the second event is set; the first one says that it was come to."""
    come, go = threading.Event(), threading.Event()
    publish = stage.artifacts.publish

    def held(job_id: str, count: int = 1) -> None:
        come.set()
        assert go.wait(60)
        publish(job_id, count)

    stage.artifacts.publish = held  # type: ignore[method-assign]
    try:
        yield come, go
    finally:
        go.set()


def test_all_outputs_are_published_with_the_job(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        job = await stage.final(await stage.add(outputs=3))
        assert job.result is not None
        assert [(each.index, each.seed) for each in job.result.outputs] == [(0, 1), (1, 2), (2, 3)]
        assert all(stage.artifacts.clip(job.id, index).exists() for index in range(3))
        assert stage.files() == []
        await stage.runner.remove(job.id)
        assert not any(stage.artifacts.clip(job.id, index).exists() for index in range(3))

    play(tmp_path, scenario)


def test_percentages_of_a_phase_are_written_now_and_then_and_a_new_phase_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every change wakes all who listen to the job: 200 streams took a third of a core.
    monkeypatch.setattr("diffusion_service.jobs.conduct.PERCENT_EVERY_S", 600)
    monkeypatch.setattr("diffusion_service.jobs.conduct.SHORT_JOB_S", 0)

    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: stage.engine.at_work)
        conduct = next(iter(stage.runner._line))
        written: list[str] = []
        tell = stage.feed.tell
        stage.store._tell = lambda changed: (written.append(changed), tell(changed))
        for done in range(1, 31):
            conduct._reached("denoising", done, 30, 0)
            await asyncio.sleep(0.001)
        assert len(written) <= 1
        conduct._reached("decoding", 1, 30, 0)
        await stage.until(lambda: _phase_is(stage, job, "decoding"))
        stage.open()
        assert (await stage.final(job)).status == "completed"

    play(tmp_path, scenario)


async def _phase_is(stage: Stage, job: str, phase: str) -> bool:
    return (await stage.job(job)).phase == phase


def test_the_kept_conditioning_is_reported(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        job = await stage.final(await stage.add())
        assert job.conditioning_cache == "miss"
        assert video_of(job).conditioning_cache == "miss"

    play(tmp_path, scenario)


@pytest.mark.parametrize("phase", ["encoding", "denoising"])
def test_a_job_that_takes_too_long_fails_as_timeout_and_stops_its_work(tmp_path: Path, phase: str) -> None:
    async def scenario(stage: Stage) -> None:
        if phase == "denoising":
            stage.handover.gate.set()
        job = await stage.final(await stage.add())
        assert job.error is not None
        assert (job.status, job.error.code, job.attempt) == ("failed", "timeout", 1)
        assert "service.job_timeout_s" in job.error.message
        assert stage.files() == []

    play(tmp_path, scenario, replace(RULES, job_timeout_s=0.05))


def test_time_that_a_job_waits_for_its_turn_does_not_count(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        first, second = await stage.add(), await stage.add()
        await stage.until(lambda: second in stage.handover.held)
        assert (await stage.final(first)).status == "failed"
        stage.engine.gate.set()
        assert (await stage.final(second)).status == "completed"

    play(tmp_path, scenario, replace(RULES, job_timeout_s=1.5))


def test_a_cancel_that_comes_after_the_clip_is_made_finds_a_completed_job(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        with publishing_held(stage) as (come, go):
            stage.open()
            job = await stage.add()
            await stage.until(come.is_set)
            cancelling = asyncio.create_task(stage.runner.cancel(job))
            await asyncio.sleep(0.02)
            assert not cancelling.done()
            go.set()
            assert (await cancelling).status == "completed"
        assert stage.artifacts.clip(job).exists()
        assert stage.files() == []

    play(tmp_path, scenario)


def test_a_delete_that_comes_while_the_clip_is_published_waits_and_removes_everything(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        with publishing_held(stage) as (come, go):
            stage.open()
            job = await stage.add(outputs=2)
            await stage.until(come.is_set)
            deleting = [asyncio.create_task(stage.runner.remove(job)) for _ in range(2)]
            await asyncio.sleep(0.02)
            go.set()
            ends = await asyncio.gather(*deleting, return_exceptions=True)
        assert None in ends
        assert all(end is None or isinstance(end, NotFound) for end in ends)
        assert await stage.store.get(job) is None
        assert not any(stage.artifacts.clip(job, index).exists() for index in range(2))
        assert stage.files() == []

    play(tmp_path, scenario)


@pytest.mark.parametrize("how", ["cancel", "remove"])
def test_stopping_twice_at_once_is_the_same_as_once(tmp_path: Path, how: str) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add()
        await stage.until(lambda: job in stage.engine.at_work)
        stop = stage.runner.cancel if how == "cancel" else stage.runner.remove
        ends = await asyncio.gather(*(stop(job) for _ in range(5)), return_exceptions=True)
        assert not [end for end in ends if isinstance(end, BaseException) and not isinstance(end, NotFound)]
        assert stage.engine.at_work == []
        assert stage.files() == []

    play(tmp_path, scenario)


def test_a_cancel_while_a_dead_rank_is_reported_leaves_no_second_attempt(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        stage.engine.errors.append(RankDied("gone"))
        for turns in range(25):
            job = await stage.add()
            for _ in range(turns):
                await asyncio.sleep(0)
            assert (await stage.runner.cancel(job)).status == "cancelled"
            assert stage.files() == []

    play(tmp_path, scenario)


def test_half_of_several_outputs_is_gone_when_the_job_goes_back_to_the_queue(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.handover.gate.set()
        job = await stage.add(outputs=2)
        await stage.until(lambda: job in stage.engine.at_work)
        stage.artifacts.part(job, 0).write_bytes(b"whole, and no use alone")
        await stage.runner.drain(0.01)
        assert (await stage.job(job)).status == "queued"
        assert [path.parent.name for path in stage.files()] == [job]

    play(tmp_path, scenario)


def test_jobs_are_counted_by_their_end_and_forwards_as_they_are_done(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        first = await stage.add(outputs=2)
        assert (await stage.final(first)).status == "completed"
        stage.engine.errors.append(RankFailed("no room", code="out_of_memory"))
        assert (await stage.final(await stage.add())).status == "failed"
        seen = exposition(stage.registry).decode()
        assert 'h3_jobs_ended_total{status="completed",task="t2va"} 1.0' in seen
        assert 'h3_jobs_ended_total{status="failed",task="t2va"} 1.0' in seen
        assert 'h3_job_failures_total{code="out_of_memory"} 1.0' in seen
        assert 'h3_forwards_total{task="t2va"} 4.0' in seen
        assert 'h3_forward_seconds_sum{task="t2va"} 2.0' in seen
        assert 'h3_phase_seconds_sum{phase="denoise",task="t2va"} 1.0' in seen
        assert 'h3_phase_seconds_sum{phase="encode",task="t2va"} 0.5' in seen
        assert "h3_job_queue_seconds_count 2.0" in seen
        assert f'h3_video_seconds_total{{task="t2va"}} {2 * 107 / 24}' in seen

    play(tmp_path, scenario)


def test_skipped_forwards_are_finished_ones_and_the_job_says_how_many(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        job = await stage.add(outputs=2, quality="high")
        before = video_of(await stage.job(job))
        assert before.step_cache is not None
        assert (before.quality, before.step_cache.skipped_forwards) == ("high", None)
        video = video_of(await stage.final(job))
        assert (video.status, video.progress) == ("completed", 100)
        assert video.step_cache is not None
        assert (video.step_cache.profile, video.step_cache.skipped_forwards) == ("first-block", 2)
        assert [output.skipped_forwards for output in video.outputs] == [1, 1]
        assert video.metrics == {"forwards": 4, "skipped_forwards": 2}
        lossless = video_of(await stage.final(await stage.add()))
        assert (lossless.quality, lossless.step_cache) == ("lossless", None)
        assert lossless.metrics == {"forwards": 2, "skipped_forwards": 0}
        seen = exposition(stage.registry).decode()
        assert 'h3_forwards_total{task="t2va"} 6.0' in seen
        assert 'h3_forwards_skipped_total{task="t2va"} 2.0' in seen
        assert 'h3_forward_seconds_count{task="t2va"} 4.0' in seen

    play(tmp_path, scenario)


def test_a_job_that_fails_says_where_its_time_went(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        stage.engine.errors.append(RankFailed("no room", code="out_of_memory"))
        job = await stage.final(await stage.add())
        assert job.status == "failed"
        whole, queued, *parts = job.spans
        assert (whole.name, whole.parent, queued.name) == ("job t2va", None, "queued")
        assert "wait for its turn" in [part.name for part in parts]
        assert {part.parent for part in (queued, *parts)} == {whole.id}
        assert stage.exported == [(job.request_id, list(job.spans))]

    play(tmp_path, scenario)
