"""How often the judge is right: clips of known scenes through the real muxer, some spoiled, judged from their files.

python -m tests.meaning.accuracy --clips 200 --decibel 25
"""

import argparse
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shared_runtime.demo.scene import Scene, draw
from shared_runtime.demo.world import frames, sound
from tests.meaning.clips import spoiled
from tests.meaning.judge import judge
from video_client.scenes import write_clip

CANVASES = ((64, 96), (96, 64), (64, 64))
LENGTHS = (107, 124, 209)
HISS = 0.02
"""Of the noise that goes with a spoiled picture, of full scale."""


@dataclass
class Score:
    """How many clips were judged, and what was wrong."""

    clips: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def rate(clips: int, decibel: float | None, seed: int, folder: Path) -> Score:
    """Judge `clips` clips, spoiled to a PSNR of `decibel` where that is given."""
    random, score = np.random.default_rng(seed), Score()
    for index in range(clips):
        scene = draw(random, unseen=bool(index % 2))
        height, width = CANVASES[index % len(CANVASES)]
        agreed = _judged(scene, (LENGTHS[index % 7 // 3], height, width), decibel, random, folder / "clip.mp4")
        score.clips += 1
        score.wrong.update(aspect for aspect, right in agreed.items() if not right)
        if not all(agreed.values()):
            score.notes.append(f"{sorted(a for a in agreed if not agreed[a])} of {scene}")
    return score


def _judged(
    scene: Scene, size: tuple[int, int, int], decibel: float | None, random: np.random.Generator, file: Path
) -> dict[str, bool]:
    pictures, waveform = frames(scene, *size), sound(scene, *size)
    if decibel is not None:
        pictures = spoiled(pictures, random, decibel)
        waveform += random.normal(0, HISS, waveform.shape).astype(np.float32)
    return judge(write_clip(file, pictures, waveform)).agrees(scene)


def main() -> None:
    """Print how often each aspect is judged rightly."""
    parser = argparse.ArgumentParser(description="How often the judge is right.")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--decibel", type=float, help="spoil the pictures to this PSNR")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        score = rate(options.clips, options.decibel, options.seed, Path(folder))
    for note in score.notes:
        print("wrong:", note)
    print(f"{score.clips} clips, {len(score.notes)} judged wrongly somewhere: {dict(score.wrong)}")


if __name__ == "__main__":
    main()
