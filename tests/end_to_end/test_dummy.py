"""`load_format: dummy`: both services from a folder of configs, which every place that names the weights admits."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Pair, make_pair

pytestmark = pytest.mark.slow

DUMMY = """
base_config: tiny
stages:
  - {stage_id: 0, load_format: dummy}
  - {stage_id: 1, load_format: dummy}
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    """A pair without a single file of weights."""
    root = tmp_path_factory.mktemp("dummy")
    (root / "dummy.yaml").write_text(DUMMY)
    configs = root / "configs"
    shutil.copytree(checkpoint, configs, ignore=shutil.ignore_patterns("*.safetensors*"))
    pair = make_pair(root, str(configs), base="dummy.yaml")
    with pair.running():
        yield pair


def test_a_clip_is_made_and_its_job_says_of_what(pair: Pair) -> None:
    video = pair.completed(pair.submit(TEXT.fields()))
    execution = video["execution"]
    assert isinstance(execution, dict)
    assert execution["load_format"] == "dummy"


def test_health_and_models_say_so(pair: Pair) -> None:
    for service in (pair.encoder, pair.diffusion):
        ranks = httpx.get(f"{service.url}/health", timeout=5).json()["ranks"]
        assert [rank["load_format"] for rank in ranks] == ["dummy"]
    assert '"dummy"' in pair.client.get("/v1/models").text
