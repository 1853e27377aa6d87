"""What the audit says of a job at its end."""

import asyncio
import logging
from pathlib import Path
from typing import Literal

import pytest

from diffusion_service.jobs.audit import gpu_seconds, log_end
from diffusion_service.jobs.job import Job, JobFailure
from shared_schema.errors import RankFailed
from tests.diffusion_service.jobs.made import completed, new_job
from tests.diffusion_service.jobs.stage import Stage, play


def encoded(cache: Literal["hit", "miss"], seconds: float = 0.5) -> Job:
    """A job whose payload lies there."""
    return new_job().start(1001.0).encoded((), {"encode": seconds, "encode_text": seconds, "transfer": 9.0}, cache)


def used(job: Job) -> float:
    return gpu_seconds(job, encoder_ranks=2, diffusion_ranks=4)


def test_seconds_of_every_rank_that_worked_are_counted() -> None:
    assert used(completed(encoded("miss"))) == 0.5 * 2 + 1.0 * 4


def test_a_file_that_is_finished_beside_the_next_job_holds_no_rank() -> None:
    job = completed(encoded("miss"))
    assert job.result is not None
    muxed = job.result.model_copy(update={"stage_durations": {"denoise": 1.0, "mux": 3.0}})
    assert used(job.model_copy(update={"result": muxed})) == 0.5 * 2 + 1.0 * 4


def test_what_was_encoded_for_another_job_costs_nothing() -> None:
    assert used(completed(encoded("hit"))) == 1.0 * 4


def test_a_job_that_did_not_complete_costs_what_it_took() -> None:
    failure = JobFailure(code="timeout", message="too long")
    waiting = new_job()
    assert used(waiting.cancel(1009.0, 60)) == 0
    assert used(waiting.start(1001.0).fail(failure, 1009.0, 60)) == 0
    assert used(encoded("miss").advance("denoising", 1).fail(failure, 1009.0, 60)) == 0.5 * 2 + 7.5 * 4


def test_the_line_names_key_job_and_end_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    job = completed(encoded("miss").model_copy(update={"key": "ann"}))
    with caplog.at_level(logging.INFO, "diffusion_service"):
        log_end(job, encoder_ranks=1, diffusion_ranks=1)
        log_end(new_job(1).cancel(1009.0, 60), encoder_ranks=1, diffusion_ranks=1)
    said = [record.getMessage() for record in caplog.records if record.name == "diffusion_service.audit"]
    assert said[0] == f"key=ann job={job.id} end=completed gpu_seconds=1.500"
    assert said[1].startswith("key=- ")
    assert job.plan.prompt not in caplog.text


def test_every_end_of_a_job_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(stage: Stage) -> None:
        stage.open()
        made = await stage.final(await stage.add())
        stage.engine.errors.append(RankFailed("no room", code="out_of_memory"))
        failed = await stage.final(await stage.add())
        while len(ends := [line for line in caplog.messages if " end=" in line]) < 2:
            await asyncio.sleep(0.01)
        assert [line.split(" gpu_seconds")[0] for line in ends] == [
            f"key=- job={made.id} end=completed",
            f"key=- job={failed.id} end=failed",
        ]
        assert ends[0].endswith("gpu_seconds=5.000")

    with caplog.at_level(logging.INFO, "diffusion_service"):
        play(tmp_path, scenario)
