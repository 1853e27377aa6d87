"""What `make demo` asks of the demo checkpoint: a clip of each task, with files that are of its little world too."""

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from diffusion_service.mux import ClipWriter
from shared_runtime.demo.scene import Motion, Pitch, Scene, Shape, Speed
from shared_runtime.demo.world import frames, sound
from shared_schema.tasks import SAMPLE_RATE
from video_client.client import VideoRequest

FRAMES, HEIGHT, WIDTH = 107, 64, 96
"""What the checkpoint was trained on: 4.5 s of its widest canvas."""
TONE_SECONDS = 2.5
BOUNCING = Scene(Shape.SQUARE, "orange", "black", Motion.BOUNCE, Speed.FAST, Pitch.LOW, 0.5, 0.0)
"""Of a combination that was never trained on."""
CROSSING = Scene(Shape.DISC, "yellow", "brown", Motion.RIGHT, Speed.SLOW, Pitch.HIGH, 0.5, 0.21)
"""From one edge of the picture to the other in just the clip's length."""
SHOWN = Scene(Shape.TRIANGLE, "green", "black", Motion.STILL, Speed.SLOW, Pitch.LOW, 0.5, 0.5)
MOVING = Scene(Shape.DISC, "pink", "grey", Motion.LEFT, Speed.FAST, Pitch.MIDDLE, 0.5, 0.78)
PROMPTS = {
    "t2va": "An orange square bounces rapidly on a black background, with a low tone.",
    "fl2va": "A yellow disc drifts to the right slowly in front of a brown wall. We hear a bright whistle.",
    "ref2va": "What picture 1 shows moves and sounds as in the video on a white background.",
}


def world_requests(folder: Path) -> dict[str, VideoRequest]:
    """One request a task by the name of its file; keyframes and references are written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"num_frames": str(FRAMES), "size": f"{WIDTH}x{HEIGHT}", "seed": "1101"}
    given = {
        "t2va": [],
        "fl2va": [
            write_picture(folder / "first.png", CROSSING),
            write_picture(folder / "last.png", CROSSING, last=True),
        ],
        "ref2va": [write_picture(folder / "thing.png", SHOWN), write_scene(folder / "motion.mp4", MOVING)],
    }
    return {task: VideoRequest(text, fields, {"task": task}, given[task]) for task, text in PROMPTS.items()}


def write_picture(path: Path, scene: Scene, *, last: bool = False) -> Path:
    """A PNG of the first frame, or of the last one."""
    Image.fromarray(frames(scene, FRAMES, HEIGHT, WIDTH)[-1 if last else 0]).save(path)
    return path


def write_scene(path: Path, scene: Scene, num_frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH) -> Path:
    """An MP4 of a scene as it should be."""
    return write_clip(path, frames(scene, num_frames, height, width), sound(scene, num_frames, height, width))


def write_clip(path: Path, pictures: NDArray[np.uint8], waveform: NDArray[np.float32]) -> Path:
    """An MP4 of frames `(n, height, width, 3)` and sound `(2, samples)`."""
    num_frames, height, width, _ = pictures.shape
    with ClipWriter(path, height, width, num_frames) as writer:
        writer.write_sound(waveform)
        writer.write_frames(pictures)
        writer.finish()
    return path


def write_tone(path: Path, scene: Scene) -> Path:
    """A stereo WAV of the scene's sound, 16 bit."""
    samples = sound(scene, FRAMES, HEIGHT, WIDTH)[:, : int(TONE_SECONDS * SAMPLE_RATE)]
    with wave.open(str(path), "wb") as target:
        target.setnchannels(2)
        target.setsampwidth(2)
        target.setframerate(SAMPLE_RATE)
        target.writeframes(np.rint(samples.T * 32767).astype("<i2").tobytes())
    return path
