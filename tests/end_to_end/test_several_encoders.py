"""Two encoder services behind one diffusion service: both are used, and one may go at any time."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.end_to_end import processes
from tests.end_to_end.clips import EQUAL_CLIPS, TEXT
from tests.end_to_end.pair import Pair, Service, free_port, make_pair, stopped_wrongly
from tests.end_to_end.test_conditioning_cache import metric

pytestmark = pytest.mark.slow

PICTURES = EQUAL_CLIPS[3]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[tuple[Pair, Service]]:
    """A pair whose diffusion service knows a second encoder too."""
    root = tmp_path_factory.mktemp("several")
    pair = make_pair(root, str(checkpoint), {"drain_s": 4, "look_ahead": 3})
    second = replace(pair.encoder, port=free_port(), log=root / "second.log")
    pair.diffusion.arguments += ["--encoder-url", second.url]
    try:
        second.start()
        pair.start()
        second.wait_ready()
        wait_trusted(pair, pair.encoder, second)
        yield pair, second
    finally:
        lives = second.process is not None and second.process.poll() is None
        wrong = [*(stopped_wrongly(second) if lives else ()), *pair.close()]
        shutil.rmtree(pair.slabs)
    assert not wrong, "\n".join([*wrong, pair.tails(), second.tail()])


def submit(pair: Pair, cases: Path, *names: str) -> list[str]:
    """Jobs that each have to be encoded."""
    return [pair.submit({**PICTURES.fields(), "prompt": name}, PICTURES.parts(cases)) for name in names]


def pushed(service: Service) -> float:
    """Payload bytes, probes included."""
    return metric(service, "h3_transport_bytes_total")


def test_both_are_used_and_the_order_is_kept(two: tuple[Pair, Service], cases: Path) -> None:
    pair, second = two
    before = [pushed(each) for each in (pair.encoder, second)]
    jobs = submit(pair, cases, *(f"spread {n}" for n in range(6)))
    ended = [float(str(pair.completed(job)["completed_at"])) for job in jobs]
    assert ended == sorted(ended)
    assert all(pushed(each) > was for each, was in zip((pair.encoder, second), before, strict=True))


def test_an_encoder_that_is_away_is_passed_by(two: tuple[Pair, Service], cases: Path) -> None:
    pair, second = two
    second.kill()
    for job in submit(pair, cases, "one is away", "and still away"):
        assert pair.completed(job)["attempt"] == 1
    assert pair.diffusion.ready()
    second.start()
    second.wait_ready()
    wait_trusted(pair, second)
    before = pushed(second)
    for job in submit(pair, cases, *(f"back {n}" for n in range(3))):
        pair.completed(job)
    assert pushed(second) > before


def busy(service: Service) -> bool:
    """Whether its ranks have been told to do something."""
    ranks = httpx.get(f"{service.url}/health", timeout=5).json()["ranks"]
    return all(rank["state"] == "busy" for rank in ranks)


def wait_trusted(pair: Pair, *encoders: Service) -> None:
    """Return when the diffusion service's last word on each of them is that it is ready."""
    for encoder in encoders:
        word = f"encoder at {encoder.url}: "
        processes.wait_until(
            lambda word=word: pair.diffusion.log.read_text().rpartition(word)[2].startswith("ready"),
            30,
            f"{word}ready",
        )


def test_jobs_encoded_ahead_survive_the_death_of_their_encoder(two: tuple[Pair, Service], cases: Path) -> None:
    # case 40
    pair, second = two
    long = {**TEXT.fields(), "num_inference_steps": "200", "size": "128x64", "num_frames": "362"}
    running = pair.submit(long)
    pair.wait_phase(running, "denoising")
    with processes.frozen([*pair.encoder.rank_pids(), *second.rank_pids()]):
        ahead = submit(pair, cases, "ahead 1", "ahead 2", "ahead 3")
        processes.wait_until(lambda: busy(pair.encoder) and busy(second), 30, "each encoder is at a job")
        processes.wait_until(lambda: pair.video(running)["progress"], 30, "the running job goes on")
        pair.encoder.kill()
        second.kill()
    pair.client.post(f"/v1/videos/{running}/cancel")
    for service in (pair.encoder, second):
        service.start()
    pair.wait_ready()
    # Two had lost the encoder that was at them; the third one still waited for one.
    assert sorted(int(str(pair.completed(job)["attempt"])) for job in ahead) == [1, 2, 2]
