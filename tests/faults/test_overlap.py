"""Faults while one job's file is finished and the next job denoises, on two ranks: each ends as it would alone."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared_runtime.tiny import tiny_checkpoint
from tests.end_to_end import processes
from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Digest, Pair, digest_of, make_pair
from tests.faults.matrix import GATES, Gates, pid_of

pytestmark = pytest.mark.slow

STUCK_S = 6.0
LIMITS = {"stuck_s": STUCK_S, "dead_s": STUCK_S, "drain_s": 4, "conditioning_cache_bytes": 0}
LONG = {**TEXT.fields(), "num_inference_steps": "200"}
LONGER = {**LONG, "size": "128x64", "num_frames": "362"}
"""Half a minute of steps."""
ENDS_S = 60.0


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The pair on two encoder ranks and two diffusion ranks, with gates."""
    root = tmp_path_factory.mktemp("overlap")
    (root / "gates").mkdir()
    pair = make_pair(
        root,
        str(tiny_checkpoint()),
        LIMITS,
        base="tiny_parallel",
        program="tests.faults.held",
        environment={GATES: str(root / "gates")},
    )
    try:
        pair.start()
        yield pair
    finally:
        Gates(root / "gates").clear()
        wrong = pair.close()
        shutil.rmtree(pair.slabs)
    assert not wrong, "\n".join([*wrong, pair.tails()])


@pytest.fixture(scope="module")
def digest(spread: Pair) -> Digest:
    """Of a clip that is made alone."""
    return digest_of(spread.completed(spread.submit(TEXT.fields())))


@pytest.fixture
def gates(spread: Pair, digest: Digest) -> Iterator[Gates]:
    """All open before and after; afterwards the pair makes the same clip as ever and holds nothing."""
    gates = Gates(spread.root / "gates")
    gates.clear()
    yield gates
    gates.clear()
    spread.wait_ready()
    assert digest_of(spread.completed(spread.submit(TEXT.fields()))) == digest
    assert spread.unfinished_files() == []


@contextmanager
def overlapping(pair: Pair, gates: Gates, second: dict[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Two jobs: the first one's file is held until the end of the block, the second one denoises."""
    with gates.held("muxing"):
        jobs = pair.submit(TEXT.fields()), pair.submit(second or LONG)
        pair.wait_phase(jobs[0], "muxing")
        pair.wait_phase(jobs[1], "denoising")
        processes.wait_until(lambda: (pair.video(jobs[1])["step"] or 0) >= 2, 20, "the second job makes steps")  # type: ignore[operator]
        assert pair.video(jobs[0])["phase"] == "muxing"
        yield jobs


@contextmanager
def first_output_held(pair: Pair, gates: Gates) -> Iterator[str]:
    """A job of two outputs: the file of the first one is held until the end of the block, the second one denoises."""
    with gates.held("muxing"):
        job = pair.submit({**LONG, "num_outputs_per_prompt": "2"})
        pair.wait_phase(job, "muxing")
        pair.wait_phase(job, "denoising")
        assert pair.video(job)["attempt"] == 1
        yield job


def test_the_next_job_makes_steps_while_a_file_is_finished_and_they_end_in_order(
    spread: Pair, gates: Gates, digest: Digest
) -> None:
    alone = digest_of(spread.completed(spread.submit(LONG)))
    with overlapping(spread, gates) as (first, second):
        time.sleep(0.5)
        assert spread.video(first)["status"] == "in_progress"
    done = spread.completed(first)
    assert spread.video(second)["status"] == "in_progress"
    assert done["stage_durations"]["mux"] > 0.5  # type: ignore[index]
    last = spread.completed(second)
    assert (digest_of(done), digest_of(last)) == (digest, alone)
    assert done["attempt"] == last["attempt"] == 1
    assert done["completed_at"] <= last["completed_at"]  # type: ignore[operator]


def test_a_file_of_one_output_is_finished_while_the_next_one_denoises(
    spread: Pair, gates: Gates, digest: Digest
) -> None:
    with first_output_held(spread, gates) as job:
        gates.wait("muxing")
    assert len(spread.completed(job)["outputs"]) == 2  # type: ignore[arg-type]


def test_a_full_disk_under_one_output_fails_the_whole_job_before_the_next_one_is_decoded(
    spread: Pair, gates: Gates
) -> None:
    ranks = spread.diffusion.rank_pids()
    with first_output_held(spread, gates) as job:
        (gates.folder / "decoding.reached-0").unlink()
        (gates.folder / "muxing.full-0").touch()
        (gates.folder / "muxing").unlink()
        failed = spread.wait_final(job)
        assert not (gates.folder / "decoding.reached-0").exists()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "internal_error")  # type: ignore[index]
    assert spread.unfinished_files() == []
    assert not list(spread.state.rglob(f"{job}*"))
    assert spread.diffusion.rank_pids() == ranks


def test_a_cancel_is_over_once_nobody_writes_a_file_of_the_job(spread: Pair, gates: Gates) -> None:
    with ThreadPoolExecutor(1) as pool:
        with first_output_held(spread, gates) as job:
            cancelling = pool.submit(spread.client.post, f"/v1/videos/{job}/cancel")
            time.sleep(0.7)
            assert not cancelling.done()
        assert cancelling.result().json()["status"] == "cancelled"
    assert spread.unfinished_files() == []
    assert not list(spread.state.rglob(f"{job}*"))


@pytest.mark.parametrize("process", ["diffusion-u0", "diffusion-u1"])
def test_a_rank_is_killed_under_both_jobs(spread: Pair, gates: Gates, digest: Digest, process: str) -> None:
    with overlapping(spread, gates) as (first, second):
        old = pid_of(spread, process)
        os.kill(old, signal.SIGKILL)
        processes.wait_until(lambda: not processes.is_alive(old), 10, "it is gone")
        time.sleep(0.5)
    ends = [spread.completed(job, ENDS_S) for job in (first, second)]
    # The file was the leader's alone by then.
    assert [end["attempt"] for end in ends] == [2 if process == "diffusion-u0" else 1, 2]
    assert digest_of(ends[0]) == digest


def test_a_full_disk_fails_the_job_whose_file_it_is(spread: Pair, gates: Gates) -> None:
    ranks = spread.diffusion.rank_pids()
    with overlapping(spread, gates) as (first, second):
        (gates.folder / "muxing.full-0").touch()
        (gates.folder / "muxing").unlink()
        failed = spread.wait_final(first)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "internal_error")  # type: ignore[index]
    assert "could not be written" in failed["error"]["message"]  # type: ignore[index]
    assert spread.completed(second)["attempt"] == 1
    assert spread.diffusion.rank_pids() == ranks


def test_either_job_is_cancelled_and_the_other_goes_on(spread: Pair, gates: Gates, digest: Digest) -> None:
    with overlapping(spread, gates) as (first, second):
        assert spread.client.post(f"/v1/videos/{second}/cancel").status_code == 200
        assert spread.video(second)["status"] == "cancelled"
        assert spread.video(first)["phase"] == "muxing"
    assert digest_of(spread.completed(first)) == digest
    with ThreadPoolExecutor(1) as pool:
        with overlapping(spread, gates) as (first, second):
            cancelling = pool.submit(spread.client.post, f"/v1/videos/{first}/cancel")
            time.sleep(0.5)
            assert spread.video(second)["phase"] == "denoising"
        assert cancelling.result().status_code == 200
    assert spread.video(first)["status"] == "cancelled"
    assert spread.completed(second)["attempt"] == 1


def test_a_file_that_is_never_finished_is_noticed_while_the_next_job_makes_steps(spread: Pair, gates: Gates) -> None:
    with overlapping(spread, gates, LONGER) as (first, second):
        processes.wait_until(
            lambda: [spread.video(job)["attempt"] for job in (first, second)] == [2, 2], STUCK_S + 8, "it is noticed"
        )
        assert spread.client.post(f"/v1/videos/{second}/cancel").status_code == 200
    assert spread.completed(first)["attempt"] == 2


@pytest.mark.steady
def test_fifty_jobs_leave_neither_threads_nor_memory(spread: Pair, gates: Gates, digest: Digest) -> None:
    fields = {**TEXT.fields(), "num_inference_steps": "2"}
    # Allocators have what they need after some ten; 250 more were seen to take nothing.
    for _ in range(20):
        spread.submit(fields)
    spread.completed(spread.submit(fields))
    pids = spread.diffusion.rank_pids()
    before = [(threads(pid), processes.resident_mib(pid)) for pid in pids]
    jobs = [spread.submit(fields) for _ in range(50)]
    assert len({digest_of(spread.completed(job)) for job in jobs}) == 1
    for pid, (count, mib) in zip(pids, before, strict=True):
        assert threads(pid) <= count
        assert processes.resident_mib(pid) < mib + 32


def threads(pid: int) -> int:
    """Of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))
