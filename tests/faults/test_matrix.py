"""Every process struck in every phase on `tiny_parallel`: the job is tried once more and its clip is as ever.

CI runs each process and signal in one phase and each phase for one process; `make faults` the whole matrix.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_runtime.tiny import tiny_checkpoint
from tests.end_to_end import processes
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT
from tests.end_to_end.pair import Digest, Pair, digest_of, make_pair
from tests.faults.matrix import GATES, STATED_S, Fault, Gates, in_ci, pid_of, service_of, strike, whole

pytestmark = pytest.mark.slow

LIMITS = {"stuck_s": 3, "dead_s": 3, "drain_s": 4, "conditioning_cache_bytes": 0, "encode_timeout_s": 20, "lease_s": 10}
PICTURES = next(clip for clip in EQUAL_CLIPS if clip.name == "fl2va_both")
ALL = os.environ.get("FAULT_MATRIX") == "whole"


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The pair on two encoder ranks and two diffusion ranks, with gates."""
    root = tmp_path_factory.mktemp("spread")
    gates = root / "gates"
    gates.mkdir()
    pair = make_pair(
        root,
        str(tiny_checkpoint()),
        LIMITS,
        base="tiny_parallel",
        program="tests.faults.held",
        environment={GATES: str(gates)},
    )
    try:
        pair.start()
        yield pair
    finally:
        Gates(gates).clear()
        wrong = pair.close()
        shutil.rmtree(pair.slabs)
    assert not wrong, "\n".join([*wrong, pair.tails()])


@pytest.fixture(scope="module")
def quiet(spread: Pair, cases: Path) -> Digest:
    """Of the clip of `PICTURES` when nothing is struck."""
    return digest_of(spread.completed(spread.submit(PICTURES.fields(), PICTURES.parts(cases))))


@pytest.fixture
def gates(spread: Pair) -> Iterator[Gates]:
    """The gates, all open before and after; afterwards the pair serves and holds nothing of what was struck."""
    gates = Gates(spread.root / "gates")
    gates.clear()
    yield gates
    gates.clear()
    spread.wait_ready()
    spread.completed(spread.submit(TEXT.fields()))
    assert spread.unfinished_files() == []
    assert len([path for path in spread.slabs.rglob("*") if path.is_file()]) == 1
    expected = 2 + 2 + 4
    processes.wait_until(
        lambda: len(processes.marked(spread.mark)) == expected, 30, "two API processes, two forkers, four ranks"
    )


def settled(pair: Pair, job: str, quiet: Digest) -> dict[str, object]:
    """The job once it is completed, which it is after one fault, with the same clip as without."""
    pair.wait_ready()
    video = pair.completed(job, STATED_S)
    assert digest_of(video) == quiet
    return video


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["encoding", "denoising", "decoding"])
def test_a_job_without_memory_fails_as_that_and_the_next_one_is_as_ever(
    spread: Pair, gates: Gates, phase: str, rank: int
) -> None:
    # cases 4 and 5, as far as a CPU goes
    before = spread.completed(spread.submit(TEXT.fields()))
    gates.arm(phase, "memory", rank)
    failed = spread.wait_final(spread.submit(TEXT.fields()), STATED_S)
    assert failed["error"]["code"] == "out_of_memory", failed["error"]  # type: ignore[index]
    gates.clear()
    spread.wait_ready()
    assert digest_of(spread.completed(spread.submit(TEXT.fields()))) == digest_of(before)


@pytest.mark.parametrize("fault", whole() if ALL else in_ci(), ids=str)
def test_a_process_that_is_struck(spread: Pair, gates: Gates, cases: Path, quiet: Digest, fault: Fault) -> None:
    # cases 23, 40, 41, 42
    old = pid_of(spread, fault.process)
    if fault.phase == "idle":
        strike(spread, fault)
        service = service_of(spread, fault.process)
        processes.wait_until(
            lambda: not service.ready() or fault.signal == "STOP" or pid_of_or_none(spread, fault) != old,
            30,
            "it is noticed",
        )
        if fault.process == "diffusion-api":
            spread.wait_ready()
        settled(spread, spread.submit(PICTURES.fields(), PICTURES.parts(cases)), quiet)
        return
    with gates.held(fault.phase):
        job = spread.submit(PICTURES.fields(), PICTURES.parts(cases))
        gates.wait(fault.phase)
        strike(spread, fault)
        if not fault.api:
            processes.wait_until(lambda: pid_of_or_none(spread, fault) != old, 60, "the group is another one")
    assert settled(spread, job, quiet)["attempt"] == 1 + fault.costs_an_attempt


def pid_of_or_none(pair: Pair, fault: Fault) -> int | None:
    """The rank's pid, or None while its group is between two starts."""
    try:
        return pid_of(pair, fault.process)
    except (ValueError, OSError):
        return None


@pytest.mark.parametrize(("phase", "rank"), [("encoding", 1), ("denoising", 1), ("decoding", 0)])
def test_an_exception_on_one_rank_only(spread: Pair, gates: Gates, cases: Path, phase: str, rank: int) -> None:
    # case 10: the others wait in a collective
    gates.arm(phase, "raise", rank)
    job = spread.submit(PICTURES.fields(), PICTURES.parts(cases))
    gates.wait(phase)
    video = spread.wait_final(job, STATED_S)
    assert (video["status"], video["error"]["code"]) == ("failed", "internal_error")  # type: ignore[index]


@pytest.mark.parametrize(("phase", "rank"), [("encoding", 0), ("denoising", 1)])
def test_a_rank_that_spins_while_the_others_wait(
    spread: Pair, gates: Gates, cases: Path, quiet: Digest, phase: str, rank: int
) -> None:
    # case 41
    gates.arm(phase, "spin", rank)
    job = spread.submit(PICTURES.fields(), PICTURES.parts(cases))
    gates.wait(phase)
    service = service_of(spread, "encoder" if phase == "encoding" else "diffusion")
    processes.wait_until(lambda: not service.ready(), 30, "readyz turns")
    gates.clear()
    assert settled(spread, job, quiet)["attempt"] == 2
