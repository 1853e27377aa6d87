"""Both services with their ranks on a Ray cluster of two nodes: a whole job, and one whose follower dies."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end import processes
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT
from tests.end_to_end.pair import Pair, make_pair
from tests.ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.slow

(MIXED,) = (clip for clip in EQUAL_CLIPS if clip.name == "ref2va_mixed")
LONG = {**TEXT.fields(), "num_frames": "362", "num_inference_steps": "150"}
GONE_S = 15.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Room for four ranks; both leaders are on the first node, so that one follower has to be on the second."""
    with ray_cluster((3, 1)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, cluster: RayCluster) -> Iterator[Pair]:
    """`tiny_parallel` on that cluster; after it no rank is left."""
    root = tmp_path_factory.mktemp("ray")
    (root / "ray.yaml").write_text("base_config: tiny_parallel\ndistributed_executor_backend: ray\n")
    environment = {"RAY_ADDRESS": cluster.address}
    pair = make_pair(root, str(checkpoint), {"stuck_s": 20, "dead_s": 5}, base="ray.yaml", environment=environment)
    ranks: list[int] = []
    try:
        pair.start()
        yield pair
        ranks = [*pair.encoder.rank_pids(), *pair.diffusion.rank_pids()]
    finally:
        wrong = pair.close()
        shutil.rmtree(pair.slabs)
    assert not wrong, "\n".join([*wrong, pair.tails()])
    processes.wait_until(lambda: not any(map(processes.is_alive, ranks)), GONE_S, "the ranks are gone")


def test_a_job_is_done_by_ranks_on_two_nodes(pair: Pair, cluster: RayCluster, cases: Path) -> None:
    _, second = cluster.raylets()
    ranks = [*pair.encoder.rank_pids(), *pair.diffusion.rank_pids()]
    assert len(ranks) == 4
    assert len([rank for rank in ranks if second in ancestors(rank)]) == 1
    pair.completed(pair.submit(MIXED.fields(), MIXED.parts(cases)))
    for service in (pair.encoder, pair.diffusion):
        assert "ray" not in service.log.read_text().replace("ray.yaml", "").partition("ready at")[2].lower()


def test_a_job_whose_follower_dies_is_tried_once_more(pair: Pair) -> None:
    leader, follower = pair.diffusion.rank_pids()
    job = pair.submit(LONG)
    pair.wait_phase(job, "denoising")
    os.kill(follower, signal.SIGKILL)
    assert pair.completed(job)["attempt"] == 2
    assert not processes.is_alive(leader)


def ancestors(pid: int) -> list[int]:
    status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return [pid, *ancestors(int(status[1]))] if pid > 1 else []
