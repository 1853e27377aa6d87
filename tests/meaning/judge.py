"""The judge: whether an MP4 shows and sounds like a scene. It reads the file alone, never how it was made."""

from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from shared_runtime.demo.scene import Motion, Scene
from shared_schema.tasks import FPS
from tests.meaning.hearing import Heard, hear
from tests.meaning.seeing import Seen, see

Floats = NDArray[np.float64]

FRAME = 1 / FPS
EDGE = 2.5 * FRAME
"""Contacts so near the ends of a clip may lack one side to be told by."""
ASIDE = 0.12
"""By how much of the picture's width the sound may come from elsewhere than the thing is, at the median."""


@dataclass(frozen=True)
class Judgement:
    """What was seen and heard."""

    seen: Seen
    heard: Heard
    seconds: float

    def agrees(self, scene: Scene) -> dict[str, bool]:
        """Aspect by aspect, whether the clip is as the scene says."""
        seen, still = self.seen, scene.motion is Motion.STILL
        return {
            "colour": seen.colour == scene.colour,
            "shape": seen.shape == scene.shape,
            "background": seen.background == scene.background,
            "motion": seen.motion == scene.motion,
            "speed": seen.motion == scene.motion and (still or seen.speed == scene.speed),
            "pitch": self.heard.pitch == scene.pitch,
            "clicks": seen.motion == scene.motion and self.clicks_fit(),
            "pan": self.pan_fits(),
        }

    def clicks_fit(self) -> bool:
        """Whether there is a click within one frame of every contact, and none elsewhere."""
        return _matched(self.seen.contacts, self.heard.clicks, self.seconds) and _matched(
            self.heard.clicks, self.seen.contacts, self.seconds
        )

    def pan_fits(self) -> bool:
        """Whether the sound comes from where the thing is."""
        apart = np.abs(self.seen.sides - self.heard.sides)
        both = apart[~np.isnan(apart)]
        return len(both) > 0 and float(np.median(both)) < ASIDE


def _matched(times: Floats, others: Floats, seconds: float) -> bool:
    inner = times[(times > EDGE) & (times < seconds - EDGE)]
    return all(np.abs(others - time).min(initial=np.inf) <= FRAME for time in inner)


def judge(clip: Path) -> Judgement:
    """Look at and listen to an MP4.

    Raises:
        av.FFmpegError, OSError: there is no such file, or it is broken.
    """
    frames, sound = decode(clip)
    return judge_decoded(frames, sound)


def judge_decoded(frames: NDArray[np.uint8], sound: NDArray[np.float32]) -> Judgement:
    """The same of what is decoded already: `(n, height, width, 3)` and `(2, samples)`."""
    return Judgement(see(frames), hear(sound, len(frames)), len(frames) / FPS)


def decode(clip: Path) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames `(n, height, width, 3)` RGB and sound `(2, samples)` of an MP4."""
    pictures, sounds = [], []
    with av.open(str(clip)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        for frame in (frame for packet in container.demux(video, audio) for frame in packet.decode()):
            if isinstance(frame, av.VideoFrame):
                pictures.append(frame.to_ndarray(format="rgb24"))
            else:
                sounds.append(frame.to_ndarray())
    return np.stack(pictures), np.concatenate(sounds, axis=1)
