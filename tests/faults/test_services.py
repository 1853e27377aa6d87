"""A whole service that is stopped or killed: its ranks go with it, its peer stays, and a new start goes on."""

import time
from pathlib import Path

import pytest

from tests.end_to_end import processes
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT
from tests.end_to_end.pair import GONE_S, Pair, digest_of
from tests.faults.test_ranks import LONG, SERVICES, service_of

pytestmark = pytest.mark.slow

MIXED = EQUAL_CLIPS[8]
ATTEMPTS = pytest.mark.parametrize(("how", "attempts"), [("TERM", 1), ("KILL", 2)])
"""Who is told to end hands its job back; who is killed has spent an attempt."""
FAILS_S = 10.0
"""From the death of a service to the failure of a job that was at it."""


def end_service(pair: Pair, name: str, how: str) -> None:
    """TERM or KILL the API process; afterwards none of its processes may be left, and its peer is as it was."""
    service, peer = service_of(pair, name), service_of(pair, "diffusion" if name == "encoder" else "encoder")
    peer_ranks = peer.rank_pids()
    own = processes.marked(pair.mark) - {peer.pid, *peer_ranks} - forkers(peer_ranks)
    if how == "KILL":
        service.kill()
    else:
        assert service.stop() == 0
    processes.wait_until(lambda: not any(map(processes.is_alive, own)), GONE_S, f"processes of {name} are gone")
    assert peer.rank_pids() == peer_ranks


def forkers(ranks: list[int]) -> set[int]:
    """The parents of these ranks."""
    return {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in ranks}


def settle(pair: Pair, job: str) -> dict[str, object]:
    """Both services run again, and the job is completed."""
    for service in (pair.encoder, pair.diffusion):
        assert service.process is not None
        if service.process.poll() is not None:
            service.start()
    pair.wait_ready()
    return pair.completed(job)


@SERVICES
@pytest.mark.parametrize("how", ["TERM", "KILL"])
def test_an_idle_service_ends_whole_and_its_peer_serves_the_next_start(pair: Pair, name: str, how: str) -> None:
    # cases 40, 48 and 55
    end_service(pair, name, how)
    slabs = [path for path in pair.slabs.rglob("*") if path.is_file()]
    if name == "diffusion" and how == "TERM":
        assert slabs == [], "a service that stops in peace takes its slab along"


@ATTEMPTS
def test_an_encoder_that_ends_while_it_encodes(pair: Pair, cases: Path, how: str, attempts: int) -> None:
    with processes.frozen(pair.encoder.rank_pids()):
        job = pair.submit(MIXED.fields(), MIXED.parts(cases))
        pair.wait_phase(job, "encoding")
        end_service(pair, "encoder", how)
    video = settle(pair, job)
    assert video["attempt"] == attempts
    assert digest_of(video) == digest_of(pair.completed(pair.submit(MIXED.fields(), MIXED.parts(cases))))


def test_a_job_whose_encoder_is_killed_twice_fails_as_worker_died(pair: Pair, cases: Path) -> None:
    # case 40
    job = pair.submit(MIXED.fields(), MIXED.parts(cases))
    pair.wait_phase(job, "encoding")
    end_service(pair, "encoder", "KILL")
    processes.wait_until(lambda: pair.video(job)["attempt"] == 2, FAILS_S, "it waits to be tried once more")
    assert pair.video(job)["status"] == "queued"
    pair.encoder.start()
    pair.wait_phase(job, "encoding")
    pair.encoder.kill()
    video = pair.wait_final(job, FAILS_S)
    assert (video["status"], video["error"]["code"]) == ("failed", "worker_died")  # type: ignore[index]
    assert pair.client.get("/livez").status_code == 200


@ATTEMPTS
def test_a_diffusion_service_that_ends_while_it_denoises(pair: Pair, how: str, attempts: int) -> None:
    job, following = pair.submit(LONG), pair.submit(TEXT.fields())
    pair.wait_phase(job, "denoising")
    end_service(pair, "diffusion", how)
    video = settle(pair, job)
    assert video["attempt"] == attempts
    assert digest_of(video) == digest_of(pair.completed(pair.submit(LONG)))
    pair.completed(following)


def test_both_killed_at_once_with_jobs_in_every_place(pair: Pair, cases: Path) -> None:
    jobs = [pair.submit(LONG), pair.submit(MIXED.fields(), MIXED.parts(cases)), pair.submit(TEXT.fields())]
    pair.wait_phase(jobs[0], "denoising")
    # In this order: who lives to see its encoder die has spent an attempt.
    pair.diffusion.kill()
    pair.encoder.kill()
    processes.wait_until(lambda: not processes.marked(pair.mark), GONE_S, "no process is left")
    assert [settle(pair, job)["attempt"] for job in jobs] == [2, 1, 1]


def test_jobs_wait_while_the_encoder_is_away(pair: Pair) -> None:
    end_service(pair, "encoder", "KILL")
    assert pair.client.get("/livez").status_code == 200
    processes.wait_until(
        lambda: not pair.diffusion.ready(), 30, "the diffusion service is not ready without an encoder"
    )
    assert pair.client.get("/readyz/api").status_code == 200
    begun = time.monotonic()
    job = pair.submit(TEXT.fields())
    assert time.monotonic() - begun < 10
    time.sleep(2)
    assert pair.video(job)["status"] == "queued"
    assert settle(pair, job)["attempt"] == 1
