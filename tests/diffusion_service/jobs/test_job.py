"""How one job may change, and what is refused."""

from collections.abc import Callable
from typing import get_args

import pytest

from diffusion_service.jobs.job import ClipResult, Job, JobFailure, Transition
from shared_schema.errors import JobErrorCode
from shared_schema.tasks import Canvas
from tests.diffusion_service.jobs.made import PLAN, RESULT, RETENTION_S, completed, failed, new_job

NOW = 2000.0
LOST = JobFailure(code="worker_died", message="a rank is gone")
Change = Callable[[Job], Job]
ENDS: dict[str, Change] = {
    "completed": completed,
    "failed": failed,
    "cancelled": lambda job: job.cancel(1002.0, RETENTION_S),
}


def begun() -> Job:
    return new_job(webhook_url="http://hooks.test/x").claimed("A").start(1001.0)


def test_each_output_has_the_next_seed_from_the_last_int64_on_to_the_first() -> None:
    assert [PLAN.model_copy(update={"seed": 7}).seed_of(index) for index in range(3)] == [7, 8, 9]
    last = PLAN.model_copy(update={"seed": 2**63 - 1})
    assert [last.seed_of(index) for index in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]


def test_forwards_are_one_fewer_than_sigma_points_and_the_canvas_is_the_plans() -> None:
    assert PLAN.model_copy(update={"num_inference_steps": 50}).forwards == 49
    assert PLAN.canvas == Canvas(PLAN.height, PLAN.width)


@pytest.mark.parametrize("code", get_args(JobErrorCode))
def test_only_a_dead_worker_and_a_lost_payload_are_tried_again_and_only_once(code: JobErrorCode) -> None:
    failure = JobFailure(code=code, message="no")
    assert begun().may_retry(failure) == (code in ("worker_died", "transfer_failed"))
    assert not begun().requeue().claimed("A").start(NOW).may_retry(failure)


def test_progress_never_falls_and_is_whole_only_once_the_clip_can_be_read() -> None:
    job = begun().advance("denoising", 40).advance("decoding", 30)
    assert (job.phase, job.progress) == ("decoding", 40)
    job = job.advance("muxing", 100)
    assert job.progress == 99
    assert completed(job).progress == 100


def test_times_of_the_encoder_and_of_the_ranks_stand_side_by_side() -> None:
    job = begun().encoded((), {"encode": 2.0}, "miss").encoded((), {"transfer": 0.5}, "hit")
    result = ClipResult(**{**dict(RESULT), "stage_durations": {"denoise": 9.0}})
    job = job.complete(result, NOW, RETENTION_S)
    assert (job.stage_durations, job.conditioning_cache) == ({"encode": 2.0, "transfer": 0.5, "denoise": 9.0}, "hit")


@pytest.mark.parametrize("end", ENDS)
def test_an_end_frees_the_job_dates_it_and_makes_its_webhook_due(end: str) -> None:
    job = ENDS[end](begun().ask_cancel(NOW, RETENTION_S))
    assert (job.status, job.finished, job.owner, job.cancel_requested) == (end, True, None, False)
    assert (job.completed_at, job.expires_at) == (1002.0, 1002.0 + RETENTION_S)
    assert job.webhook is not None
    assert job.webhook.due_at == 1002.0
    assert ENDS[end](new_job()).webhook is None


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.claimed("B"),
        lambda job: job.released(),
        lambda job: job.start(NOW),
        lambda job: job.advance("denoising", 1),
        lambda job: job.complete(RESULT, NOW, RETENTION_S),
        lambda job: job.fail(LOST, NOW, RETENTION_S),
        lambda job: job.requeue(),
        lambda job: job.handed_back(),
        lambda job: job.cancel(NOW, RETENTION_S),
        lambda job: job.ask_cancel(NOW, RETENTION_S),
    ],
)
def test_a_finished_job_does_not_change(end: str, change: Change) -> None:
    with pytest.raises(Transition):
        change(ENDS[end](new_job()))


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.advance("denoising", 1),
        lambda job: job.complete(RESULT, NOW, RETENTION_S),
        lambda job: job.requeue(),
        lambda job: job.claimed("A").claimed("B"),
    ],
)
def test_a_queued_job_cannot_go_on_before_it_has_begun(change: Change) -> None:
    with pytest.raises(Transition):
        change(new_job())


@pytest.mark.parametrize(("back", "attempt"), [(Job.requeue, 2), (Job.put_back, 1), (Job.handed_back, 1)])
def test_a_job_goes_back_to_the_queue_as_if_it_had_not_begun(back: Change, attempt: int) -> None:
    job = back(begun().advance("denoising", 40))
    assert (job.status, job.phase, job.progress, job.started_at, job.owner) == ("queued", "queued", 0, None, None)
    assert job.attempt == attempt


def test_a_claimed_job_that_has_not_begun_is_handed_back_without_an_attempt() -> None:
    job = new_job().claimed("A").handed_back()
    assert (job.status, job.owner, job.attempt) == ("queued", None, 1)


def test_a_job_that_nobody_owns_is_cancelled_at_once_and_another_ones_owner_is_told() -> None:
    assert new_job().ask_cancel(NOW, RETENTION_S).status == "cancelled"
    asked = begun().ask_cancel(NOW, RETENTION_S)
    assert (asked.status, asked.cancel_requested, asked.owner) == ("in_progress", True, "A")


@pytest.mark.parametrize(
    ("job", "status", "attempt"),
    [
        (new_job().claimed("A"), "queued", 1),
        (begun(), "queued", 2),
        (begun().requeue().claimed("A").start(NOW), "failed", 2),
        (begun().ask_cancel(NOW, RETENTION_S), "cancelled", 1),
        (new_job().claimed("A").ask_cancel(NOW, RETENTION_S), "cancelled", 1),
    ],
)
def test_a_job_whose_owner_is_gone_begins_again_once_if_it_is_wanted(job: Job, status: str, attempt: int) -> None:
    after = job.orphaned(LOST, NOW, RETENTION_S)
    assert (after.status, after.attempt, after.owner) == (status, attempt, None)
    assert after.error == (LOST if status == "failed" else None)
