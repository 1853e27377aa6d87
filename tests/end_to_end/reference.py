"""The one-process reference: diffusers' own pipeline, in a process of its own that makes every clip it is asked for.

python -m tests.end_to_end.reference CHECKPOINT MEDIA_FOLDER CLIPS.json OUT_FOLDER
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)
from numpy.typing import NDArray

from tests.end_to_end.clips import Clip, Medium, clip_from_json
from tests.end_to_end.plain_media import SAMPLE_RATE, stereo_sound, upright_frames, upright_image


class WidePipeline(MiniMaxH3ModularPipeline):  # type: ignore[misc]
    """diffusers' pipeline for 4 s and 15 s too, which the model makes and the library refuses."""

    @property
    def min_duration(self) -> float:
        """Seconds."""
        return 4.0

    @property
    def max_duration(self) -> float:
        """Seconds: 362 frames last 15.083 s."""
        return 15.1


@dataclass(frozen=True)
class MadeClip:
    """uint8 frames `(n, height, width, 3)` and float32 sound `(2, samples)` at 32 kHz."""

    frames: NDArray[np.uint8]
    sound: NDArray[np.float32]

    def digests(self) -> dict[str, str]:
        """As the public API names them."""
        return {
            "frames_sha256": hashlib.sha256(np.ascontiguousarray(self.frames).tobytes()).hexdigest(),
            "audio_sha256": hashlib.sha256(np.ascontiguousarray(self.sound).tobytes()).hexdigest(),
        }


def load_pipeline(checkpoint: Path) -> Any:
    """Everything of the checkpoint in one process, each component in the dtype in which it is stored."""
    torch.set_num_threads(1)
    pipeline = WidePipeline.from_pretrained(str(checkpoint))
    pipeline.load_components()
    pipeline.set_progress_bar_config(disable=True)
    pipeline.processor.video_processor.cap_pixels_per_frame = False
    if pipeline.text_encoder.dtype != torch.bfloat16:
        raise RuntimeError(f"the text encoder runs in {pipeline.text_encoder.dtype}, stored is bfloat16")
    return pipeline


def make_clip(pipeline: Any, clip: Clip, folder: Path) -> MadeClip:
    """One clip, its media decoded from freshly opened files."""
    pipeline.scheduler.set_shift(clip.flow_shift)
    pipeline.audio_scheduler.set_shift(clip.audio_flow_shift)
    made = pipeline(
        prompt=clip.prompt,
        height=clip.height,
        width=clip.width,
        num_frames=clip.num_frames,
        num_inference_steps=clip.num_inference_steps,
        generator=torch.Generator().manual_seed(clip.seed),
        output_type="np",
        output=["videos", "audio"],
        **_media_inputs(clip, folder),
    )
    scaled = np.float32(255) * np.clip(made["videos"][0].astype(np.float32), 0, 1)
    return MadeClip(np.rint(scaled).astype(np.uint8), made["audio"][0].cpu().numpy().astype(np.float32))


def _media_inputs(clip: Clip, folder: Path) -> dict[str, Any]:
    names = {"first": "image", "last": "last_image"}
    keyframes = {names[m.role]: upright_image(folder / m.file) for m in clip.media if m.role != "reference"}
    references = [reference_of(medium, folder / medium.file) for medium in clip.media if medium.role == "reference"]
    return {**keyframes, "references": references} if references else keyframes


def reference_of(medium: Medium, path: Path) -> object:
    """One reference as diffusers takes it, from a freshly opened file."""
    match medium.kind:
        case "image":
            return MiniMaxH3ImageReference(image=upright_image(path))
        case "video":
            sound = stereo_sound(path)
            audio = None if sound is None else torch.from_numpy(sound)
            return MiniMaxH3VideoReference(frames=upright_frames(path), fps=24.0, audio=audio, sample_rate=SAMPLE_RATE)
        case "audio":
            return MiniMaxH3AudioReference(audio=torch.from_numpy(stereo_sound(path)), sample_rate=SAMPLE_RATE)


def main(arguments: list[str]) -> None:
    """Make every clip of the list; digests go to `digests.json`, pixels and samples to one `.npz` a clip."""
    checkpoint, folder, wanted, out = (Path(argument) for argument in arguments)
    pipeline = load_pipeline(checkpoint)
    digests = {}
    for clip in map(clip_from_json, json.loads(wanted.read_text())):
        made = make_clip(pipeline, clip, folder)
        digests[clip.name] = made.digests()
        np.savez(out / f"{clip.name}.npz", frames=made.frames, sound=made.sound)
    (out / "digests.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main(sys.argv[1:])
