"""What the stages of `training` write is served by the pair, untrained or trained: all three tasks, and its adapter."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.pair import Pair, make_pair
from tests.meaning.cases import all_cases
from tests.meaning.judge import decode
from tests.meaning.run import ServedMaker
from training.folder import MAKERS, read_component, write_component, write_frame
from training.turbo import ARTIFACTS, adapt, write_adapter
from video_client.client import VideoClient

pytestmark = pytest.mark.slow

TURBO = """
base_config: tiny
stages:
  - {{stage_id: 1, lora_path: {adapter}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that has learned nothing."""
    folder = tmp_path_factory.mktemp("demo")
    write_frame(folder, seed=0)
    for name, make in MAKERS.items():
        write_component(folder, name, make())
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Pair]:
    pair = make_pair(tmp_path_factory.mktemp("pair"), str(folder))
    with pair.running():
        yield pair


@pytest.mark.parametrize("group", ["unseen prompt", "first and last frame", "video then image", "audio then image"])
def test_a_clip_of_every_kind_is_made(pair: Pair, tmp_path: Path, group: str) -> None:
    case = next(case for case in all_cases(2, 20) if case.group == group)
    with VideoClient(pair.diffusion.url) as client:
        ServedMaker(client, tmp_path, 3, None).make(case, tmp_path / "clip.mp4")
    pictures, waveform = decode(tmp_path / "clip.mp4")
    assert pictures.shape == (107, 64, 96, 3)
    assert waveform.shape[0] == 2


def test_its_turbo_adapter_sets_the_schedule(tmp_path: Path, folder: Path) -> None:
    adapter = tmp_path / ARTIFACTS["transformer"]
    write_adapter(adapter, adapt(read_component(folder, "transformer")))
    (tmp_path / "turbo.yaml").write_text(TURBO.format(adapter=json.dumps(str(adapter))))
    turbo = make_pair(tmp_path, str(folder), base="turbo.yaml")
    with turbo.running():
        case = all_cases(2, 20)[0]
        with VideoClient(turbo.diffusion.url) as client:
            request = ServedMaker(client, tmp_path, None, None).request(case)
            video = client.wait(client.create(request).id, timeout_s=120)
    assert video.status == "completed"
    assert (video.num_inference_steps, video.forwards) == (5, 4)
