"""Groups of several ranks through HTTP: what each holds, bad requests beside good ones, and both splits alike."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.end_to_end import processes
from tests.end_to_end.bad_requests import Bad
from tests.end_to_end.clips import ONE_OF_EACH_TASK, TEXT
from tests.end_to_end.pair import Pair, digest_of, make_pair, nixl_over
from tests.end_to_end.test_text_only import TEXT_ONLY

pytestmark = pytest.mark.slow

BAD = ({"seconds": "2", "num_frames": None}, {"size": "0x64"}, {"extra_params": '{"task": "nope"}'})
LATEST_S = 20.0
"""For an answer that needs no rank, on a busy machine."""


@contextmanager
def running(root: Path, checkpoint: Path, base: str) -> Iterator[Pair]:
    # Tests stop ranks, and a machine may be slow to let them go on.
    pair = make_pair(root, str(checkpoint), {"dead_s": 60}, base=base)
    with pair.running():
        yield pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    """Two ranks in each service."""
    with running(tmp_path_factory.mktemp("parallel"), checkpoint, "tiny_parallel") as pair:
        yield pair


@pytest.fixture(scope="module")
def digests(pair: Pair, cases: Path) -> dict[str, tuple[object, object]]:
    """Of the clips of all three tasks, in the full split."""
    jobs = {clip.name: pair.submit(clip.fields(), clip.parts(cases)) for clip in ONE_OF_EACH_TASK}
    return {name: digest_of(pair.completed(job)) for name, job in jobs.items()}


def weights(url: str) -> dict[str, int]:
    """Bytes by rank, as `/health` tells them."""
    return {rank["name"]: rank["weight_bytes"] for rank in httpx.get(f"{url}/health").json()["ranks"]}


def test_every_rank_tells_what_it_holds(pair: Pair) -> None:
    encoder, diffusion = weights(pair.encoder.url), weights(pair.diffusion.url)
    assert list(encoder) == ["encoder-tp0", "encoder-tp1"]
    assert list(diffusion) == ["diffusion-u0", "diffusion-u1"]
    # The audio VAEs are the leaders' alone.
    assert encoder["encoder-tp0"] > encoder["encoder-tp1"] > 0
    assert diffusion["diffusion-u0"] > diffusion["diffusion-u1"] > 0


def test_the_layout_is_logged_once_and_shown(pair: Pair) -> None:
    layout = pair.client.get("/v1/models").json()["data"][0]["layout"]
    assert layout["encoder"]["tensor_parallel_size"] == 2
    assert (layout["diffusion"]["ulysses_degree"], layout["diffusion"]["vae_patch_parallel_size"]) == (2, 2)
    for service in (pair.encoder, pair.diffusion):
        log = service.log.read_text()
        assert log.count("encoder: devices cpu,cpu, tensor_parallel_size 2") == 1
        assert log.count("diffusion: devices cpu,cpu, tensor_parallel_size 1, ulysses_degree 2") == 1


def test_sixty_bad_requests_beside_two_good_ones(pair: Pair, digests: dict[str, tuple[object, object]]) -> None:
    # case 10
    ranks = [*pair.encoder.rank_pids(), *pair.diffusion.rank_pids()]
    bad = [Bad("", fields) for _ in range(20) for fields in BAD]  # type: ignore[arg-type]

    def refused(one: Bad) -> tuple[int, float]:
        answer = pair.post(one.form())
        return answer.status_code, answer.elapsed.total_seconds()

    with ThreadPoolExecutor(22) as pool, processes.frozen(ranks):
        good = [pool.submit(pair.submit, TEXT.fields()) for _ in range(2)]
        answers = list(pool.map(refused, bad))
        jobs = [job.result() for job in good]
    assert {status for status, _ in answers} == {400}
    assert max(seconds for _, seconds in answers) < LATEST_S
    assert [digest_of(pair.completed(job)) for job in jobs] == [digests[TEXT.name]] * 2
    assert [*pair.encoder.rank_pids(), *pair.diffusion.rank_pids()] == ranks


def test_both_splits_make_the_same_clips(
    digests: dict[str, tuple[object, object]], tmp_path: Path, checkpoint: Path, cases: Path
) -> None:
    (tmp_path / "text.yaml").write_text(TEXT_ONLY.replace("tiny", "tiny_parallel"))
    with running(tmp_path, checkpoint, "text.yaml") as text:
        jobs = {clip.name: text.submit(clip.fields(), clip.parts(cases)) for clip in ONE_OF_EACH_TASK}
        assert {name: digest_of(text.completed(job)) for name, job in jobs.items()} == digests
        leader, follower = weights(text.encoder.url).values()
        assert leader == follower, "no encoder rank has a VAE"


def test_nixl_makes_the_same_clips(
    digests: dict[str, tuple[object, object]], tmp_path: Path, checkpoint: Path, cases: Path
) -> None:
    with running(tmp_path, checkpoint, nixl_over(tmp_path, "tiny_parallel")) as nixl:
        jobs = {clip.name: nixl.submit(clip.fields(), clip.parts(cases)) for clip in ONE_OF_EACH_TASK}
        assert {name: digest_of(nixl.completed(job)) for name, job in jobs.items()} == digests
