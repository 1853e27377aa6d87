"""docker/compose.nixl.yaml and docker/compose.turbo.yaml over one stack: its payloads and its adapter."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import ARTIFACT, write_turbo
from tests.containers.stack import Stack, from_outside, running
from tests.end_to_end.pair import Pair

BARE = {"prompt": "a red ball", "size": "64x64", "num_frames": "107"}


@pytest.fixture(scope="module")
def laid_over(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Stack]:
    """With an adapter of this machine, in a folder that the containers' user may read."""
    adapters = tmp_path_factory.mktemp("adapters")
    write_turbo(adapters, checkpoint).chmod(0o644)
    adapters.chmod(0o755)
    variables = {"H3_DEPLOY_CONFIG": "/deploy/tiny_nixl.yaml", "H3_LORA_FOLDER": str(adapters)}
    with running(variables, "nixl", "turbo") as stack:
        yield stack


@pytest.fixture
def over(laid_over: Stack, tmp_path: Path) -> Iterator[Pair]:
    with from_outside(laid_over, tmp_path) as pair:
        yield pair


def test_every_job_gets_the_adapter_and_its_schedule(over: Pair) -> None:
    video = over.completed(over.submit(BARE))
    assert video["lora"] == {"name": ARTIFACT, "scale": 1.0, "modules": 18}
    assert (video["num_inference_steps"], video["forwards"]) == (5, 4)


def test_payloads_cross_by_nixl_and_the_log_has_the_rate(laid_over: Stack, over: Pair) -> None:
    over.completed(over.submit(BARE))
    pushed = over.client.get("/metrics").text
    assert re.search(r'^h3_transport_bytes_total\{transport="nixl"\} [1-9]', pushed, re.MULTILINE)
    rate = re.search(r"probe of \d+ MiB: [\d.]+ GiB/s", laid_over.logs("diffusion"))
    assert rate is not None
    print(rate[0])
