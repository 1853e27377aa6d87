"""Pictures, videos with and without sound and voices in every number together: a clip, or a refusal by a rule.

Of what is allowed, CI makes clips for every pair of numbers; `REFERENCE_MATRIX=whole` for everything with everything.
"""

import itertools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.cases.sounds import RATE, tone, write_wav
from tests.cases.videos import Recipe, constant, write_video
from tests.end_to_end.clips import FilePart, file_part
from tests.end_to_end.pair import Pair

pytestmark = pytest.mark.slow

SECONDS = 2.0
MOST_VIDEOS = 3
JOB_S = 120.0
WHOLE = os.environ.get("REFERENCE_MATRIX") == "whole"


@dataclass(frozen=True)
class Mixture:
    """How many references of each kind."""

    pictures: int
    videos: int
    silent: int
    voices: int

    @property
    def allowed(self) -> bool:
        """By the rules of ref2va: something to be seen, and at most three videos."""
        return self.pictures + self.videos + self.silent > 0 and self.videos + self.silent <= MOST_VIDEOS

    @property
    def kinds(self) -> list[str]:
        """Of the references, in the order in which they are sent: voices first, since order is kept."""
        return [
            *["audio"] * self.voices,
            *["video"] * (self.silent + self.videos),
            *["image"] * self.pictures,
        ]

    def parts(self, media: Path, cases: Path) -> list[FilePart]:
        """Files of the form."""
        files = [media / "voice.wav"] * self.voices + [media / "silent.mp4"] * self.silent
        files += [media / "sound.mp4"] * self.videos + [cases / f"ref{n + 1}.png" for n in range(self.pictures)]
        return [file_part(file) for file in files]


def pairwise(mixtures: list[Mixture]) -> list[Mixture]:
    """Few of them that hold every pair of numbers of two kinds which any of them holds."""
    pairs = {mixture: set(itertools.combinations(numbers(mixture), 2)) for mixture in mixtures}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(mixtures, key=lambda mixture: len(pairs[mixture] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def numbers(mixture: Mixture) -> list[tuple[str, int]]:
    """Numbers by kind."""
    return list(asdict(mixture).items())


EVERY = [Mixture(*counts) for counts in itertools.product((0, 1, 3), (0, 1, 3), (0, 1), (0, 1, 3))]


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shortest legal video with sound, the same without, and the shortest voice."""
    folder = tmp_path_factory.mktemp("media")
    write_wav(folder / "voice.wav", tone(SECONDS, RATE), RATE)
    for name, sound in (("sound", "click"), ("silent", None)):
        write_video(folder / f"{name}.mp4", Recipe(constant(24, SECONDS), width=64, height=64, sound=sound))
    return folder


def fields(task: str, **extra: object) -> dict[str, str]:
    """The smallest request."""
    params = json.dumps({"task": task, **extra})
    return {"prompt": "all of them", "size": "32x32", "num_frames": "107", "num_inference_steps": "2"} | {
        "extra_params": params
    }


def test_every_mixture_is_a_clip_or_refused_by_a_rule(pair: Pair, media: Path, cases: Path) -> None:
    # case 43
    allowed = [mixture for mixture in EVERY if mixture.allowed]
    made = allowed if WHOLE else pairwise(allowed)
    for mixture in EVERY:
        if not mixture.allowed:
            assert pair.post(fields("ref2va"), mixture.parts(media, cases)).status_code == 400, mixture
    jobs = {mixture: pair.submit(fields("ref2va"), mixture.parts(media, cases)) for mixture in made}
    for mixture, job in jobs.items():
        video = pair.completed(job, JOB_S)
        references = video["references"]
        assert isinstance(references, list)
        assert [each["kind"] for each in references] == mixture.kinds, mixture
        pair.client.delete(f"/v1/videos/{job}").raise_for_status()


@pytest.mark.parametrize("task", ["fl2va", "ref2va"])
def test_a_keyframe_beside_references_is_refused_by_name(pair: Pair, media: Path, cases: Path, task: str) -> None:
    # case 43
    lone_picture = Mixture(1, 0, 0, 0)
    for mixture in EVERY:
        if task == "fl2va" and mixture == lone_picture:
            continue
        answer = pair.post(fields(task, frame_indices=[0]), mixture.parts(media, cases))
        assert answer.status_code == 400, (mixture, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
