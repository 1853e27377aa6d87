"""A rank that dies or freezes: its group starts anew, the job is tried once more, and then fails with a typed error."""

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end import processes
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT
from tests.end_to_end.pair import Pair, Service

pytestmark = pytest.mark.slow

NOTICED_S = 30.0
IMPORTS_S = 90.0
"""A new forker imports torch before it can fork: 10 s on a machine that does nothing else."""
LONG = {**TEXT.fields(), "num_inference_steps": "200"}
MIXED = EQUAL_CLIPS[8]
SERVICES = pytest.mark.parametrize("name", ["encoder", "diffusion"])


def service_of(pair: Pair, name: str) -> Service:
    """By name, for parameters."""
    return pair.encoder if name == "encoder" else pair.diffusion


def wait_for_other_ranks(service: Service, old: list[int], started_s: float = NOTICED_S) -> None:
    """Until the group runs in other processes and is ready."""
    processes.wait_until(lambda: not any(map(processes.is_alive, old)), NOTICED_S, "the old ranks are gone")
    processes.wait_until(
        lambda: (new := service.rank_pids()) and not set(new) & set(old), started_s, "other ranks have started"
    )
    service.wait_ready(60)


@SERVICES
@pytest.mark.parametrize("how", ["KILL", "STOP"])
def test_an_idle_rank_is_replaced(pair: Pair, name: str, how: str) -> None:
    # cases 23 and 41
    service = service_of(pair, name)
    old = service.rank_pids()
    process = service.pid
    os.kill(old[0], getattr(signal, f"SIG{how}"))
    wait_for_other_ranks(service, old)
    assert service.pid == process
    assert service.process is not None
    assert service.process.poll() is None


@SERVICES
def test_a_forker_that_dies_takes_its_ranks_and_is_replaced(pair: Pair, name: str) -> None:
    service = service_of(pair, name)
    old = service.rank_pids()
    parent = int(Path(f"/proc/{old[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert parent != service.pid
    os.kill(parent, signal.SIGKILL)
    wait_for_other_ranks(service, old, IMPORTS_S)


def test_a_job_whose_encoder_rank_dies_is_tried_once_more(pair: Pair, cases: Path) -> None:
    # case 40
    (rank,) = pair.encoder.rank_pids()
    with processes.frozen([rank]):
        job = pair.submit(MIXED.fields(), MIXED.parts(cases))
        pair.wait_phase(job, "encoding")
        os.kill(rank, signal.SIGKILL)
    video = pair.completed(job)
    assert video["attempt"] == 2


@pytest.mark.parametrize("phase", ["denoising", "decoding"])
def test_a_job_whose_diffusion_rank_dies_is_tried_once_more(pair: Pair, phase: str) -> None:
    (rank,) = pair.diffusion.rank_pids()
    job = pair.submit(
        LONG if phase == "denoising" else {**LONG, "num_inference_steps": "2", "num_frames": "362", "size": "128x64"}
    )
    pair.wait_phase(job, phase)
    os.kill(rank, signal.SIGKILL)
    video = pair.completed(job)
    assert video["attempt"] == 2


def test_a_job_whose_rank_dies_twice_fails_as_worker_died(pair: Pair) -> None:
    job, following = pair.submit(LONG), pair.submit(TEXT.fields())
    for attempt in (1, 2):
        pair.wait_phase(job, "denoising")
        assert pair.video(job)["attempt"] == attempt
        (rank,) = pair.diffusion.rank_pids()
        os.kill(rank, signal.SIGKILL)
        processes.wait_until(lambda seen=attempt: left(pair, job, seen), NOTICED_S, "the death is noticed")  # type: ignore[misc]
    video = pair.wait_final(job)
    assert (video["status"], video["error"]["code"]) == ("failed", "worker_died")  # type: ignore[index]
    pair.completed(following)


def left(pair: Pair, job: str, attempt: int) -> bool:
    """Whether that attempt denoises no more; who looks seldom may not see the phases before the next one does."""
    video = pair.video(job)
    return video["phase"] != "denoising" or video["attempt"] != attempt


def test_a_rank_that_freezes_at_work_is_replaced_and_the_job_tried_again(pair: Pair) -> None:
    # case 23
    (rank,) = pair.diffusion.rank_pids()
    job = pair.submit(LONG)
    pair.wait_phase(job, "denoising")
    os.kill(rank, signal.SIGSTOP)
    processes.wait_until(
        lambda: not pair.diffusion.ready() or pair.diffusion.rank_pids() != [rank], NOTICED_S, "it is noticed"
    )
    video = pair.completed(job)
    assert video["attempt"] == 2
    assert not processes.is_alive(rank)


def test_terminating_a_rank_harms_no_job(pair: Pair) -> None:
    (rank,) = pair.diffusion.rank_pids()
    job = pair.submit(LONG)
    pair.wait_phase(job, "denoising")
    os.kill(rank, signal.SIGTERM)
    pair.completed(job)
