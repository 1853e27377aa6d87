from dataclasses import replace

import numpy as np
import pytest

from shared_runtime.demo.prompts import prompts
from shared_runtime.media.image import decode_image
from shared_runtime.media.video import decode_video
from tests.meaning.judge import judge_decoded
from video_client import scenes
from video_client.client import VideoRequest


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VideoRequest]:
    return scenes.world_requests(tmp_path_factory.mktemp("inputs"))


def test_every_prompt_is_one_of_the_worlds(asked: dict[str, VideoRequest]) -> None:
    following = replace(scenes.MOVING, background="white")
    assert asked["t2va"].prompt in prompts(scenes.BOUNCING)
    assert asked["fl2va"].prompt in prompts(scenes.CROSSING)
    assert asked["ref2va"].prompt in prompts(following, picture=1, video=True)
    assert scenes.BOUNCING.unseen
    assert not scenes.CROSSING.unseen


def test_each_task_has_its_files_and_its_size(asked: dict[str, VideoRequest]) -> None:
    assert {task: [path.name for path in each.references] for task, each in asked.items()} == {
        "t2va": [],
        "fl2va": ["first.png", "last.png"],
        "ref2va": ["thing.png", "motion.mp4"],
    }
    for task, request in asked.items():
        assert request.extra_params == {"task": task}
        assert (request.fields["num_frames"], request.fields["size"]) == ("107", "96x64")


def test_keyframes_are_the_ends_of_a_crossing_that_is_whole_in_both(asked: dict[str, VideoRequest]) -> None:
    first, last = (decode_image(path) for path in asked["fl2va"].references)
    # Yellow on brown: where green is bright there is the disc.
    areas = [(picture[..., 1] > 140).sum(0) for picture in (first, last)]
    assert areas[0].sum() == pytest.approx(areas[1].sum(), rel=0.03)
    assert np.flatnonzero(areas[0]).max() < 30
    assert np.flatnonzero(areas[1]).min() > 65


def test_the_video_shows_and_sounds_like_its_scene(asked: dict[str, VideoRequest]) -> None:
    video = decode_video(asked["ref2va"].references[1], max_frames=200, use_audio=True)
    assert video.waveform is not None
    assert all(judge_decoded(video.frames, video.waveform).agrees(scenes.MOVING).values())
