"""Each way of serving a request wrongly makes a run miss what it needs, shown with a maker that is right otherwise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared_runtime.demo.scene import Motion, Scene, draw
from shared_runtime.demo.world import frames, sound
from tests.meaning.cases import Case, all_cases
from tests.meaning.judge import judge
from tests.meaning.results import Results
from tests.meaning.run import Breakage, ServedMaker, run
from tests.meaning.seeing import see
from video_client.client import VideoClient, VideoRequest
from video_client.scenes import FRAMES, HEIGHT, WIDTH, write_clip

CASES = [case for case in all_cases(8, 20) if case.task != "t2va" or case.scene.motion is Motion.BOUNCE]
BOTH = "first and last frame"
PARTS: dict[str, tuple[Breakage | None, set[str], set[str]]] = {
    "nothing": (None, {BOTH, "two images", "video then image", "audio then image"}, set()),
    "order": ("order", {BOTH, "two images"}, {"fl2va: first", "fl2va: last", "ref2va: colour", "ref2va: shape"}),
    "drop": (
        "drop",
        {"two images", "video then image"},
        {"ref2va: colour", "ref2va: shape", "ref2va: motion", "ref2va: pitch"},
    ),
    "text": (
        "text",
        {"first frame", "last frame", "image", "video"},
        {"fl2va: first", "fl2va: last", "ref2va: colour", "ref2va: shape", "ref2va: motion", "ref2va: pitch"},
    ),
    "sound": ("sound", {"unseen prompt", "unseen combination"}, {"t2va: clicks"}),
}
"""What is broken, the kinds of clips that are made, and what must be missed."""


class Obedient:
    """Makes what the request says: the prompt's words, the first picture, the video and the audio with it.

    What the request says nothing of is drawn.
    """

    def __init__(self, client: VideoClient, inputs: Path, breakage: Breakage | None) -> None:
        self._asking = ServedMaker(client, inputs, 9, breakage)
        self._random = np.random.default_rng(0)

    def make(self, case: Case, clip: Path) -> None:
        request = self._asking.request(case)
        scene = self._placed(case, request, self._following(case.scene, request))
        pictures, waveform = frames(scene, FRAMES, HEIGHT, WIDTH), sound(scene, FRAMES, HEIGHT, WIDTH)
        backwards = len(request.references) > 1 and request.references[0].stem.endswith("_1")
        if request.extra_params["task"] == "fl2va" and backwards:
            pictures = pictures[::-1]
        write_clip(clip, pictures, waveform)

    def _placed(self, case: Case, request: VideoRequest, scene: Scene) -> Scene:
        if request.extra_params["task"] == "fl2va" or case.task == "t2va":
            return scene
        free = draw(self._random, unseen=False)
        return replace(scene, place=free.place, phase=free.phase)

    def _following(self, scene: Scene, request: VideoRequest) -> Scene:
        """`scene`, as far as words say it."""
        free = draw(self._random, unseen=False)
        sent = {path.suffix: path for path in reversed(request.references)}
        if "picture" in request.prompt:
            seen = _looked_at(sent[".png"]) if ".png" in sent else (free.shape, free.colour)
            scene = replace(scene, shape=seen[0], colour=seen[1])
        if "the video" in request.prompt:
            shown = _watched(sent[".mp4"], free) if ".mp4" in sent else free
            scene = replace(scene, motion=shown.motion, speed=shown.speed, pitch=shown.pitch)
        if "the audio" in request.prompt and ".wav" not in sent:
            scene = replace(scene, pitch=free.pitch)
        return scene


def _looked_at(path: Path) -> tuple[object, str]:
    seen = see(np.repeat(np.array(Image.open(path))[None], 24, axis=0))
    return seen.shape, seen.colour


def _watched(path: Path, free: Scene) -> Scene:
    judgement = judge(path)
    assert judgement.seen.motion is not None
    assert judgement.heard.pitch is not None
    speed = judgement.seen.speed or free.speed
    return replace(free, motion=judgement.seen.motion, speed=speed, pitch=judgement.heard.pitch)


SLOW = ("nothing", "drop", "text")


@pytest.mark.parametrize(
    ("breakage", "groups", "wanted"),
    [pytest.param(*part, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, part in PARTS.items()],
)
def test_what_is_broken_on_purpose_is_missed_and_nothing_else(
    tmp_path: Path, breakage: Breakage | None, groups: set[str], wanted: set[str]
) -> None:
    results = Results(tmp_path / "results.jsonl", {})
    cases = [case for case in CASES if case.group in groups]
    with VideoClient("http://127.0.0.1:9") as client:
        run(cases, [Obedient(client, tmp_path / "inputs", breakage)], results, tmp_path / "clips", breakage)
    missed = {
        line.rsplit(" ", 5)[0] for line in results.missed({case.task for case in cases}) if "not seen" not in line
    }
    assert missed == wanted, results.table()
