"""The requests whose clips are compared with the reference: plain data, and how each is written as a form."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

FilePart = tuple[str, tuple[str, bytes, str]]
Part = tuple[str, tuple[str | None, bytes | str] | tuple[str | None, bytes | str, str | None]]
"""As httpx takes a part of a multipart form: field, then name, content and type."""
MediaKind = Literal["image", "video", "audio"]
Role = Literal["first", "last", "reference"]
CONTENT_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".mp4": "video/mp4",
    ".mov": "video/quicktime",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
}


@dataclass(frozen=True)
class Medium:
    """One fixture file and what it is for."""

    file: str
    kind: MediaKind = "image"
    role: Role = "reference"


@dataclass(frozen=True)
class Clip:
    """One request with its geometry spelled out, so that both sides make the same clip."""

    name: str
    task: Literal["t2va", "fl2va", "ref2va"]
    prompt: str
    media: tuple[Medium, ...] = ()
    height: int = 64
    width: int = 64
    num_frames: int = 107
    num_inference_steps: int = 4
    seed: int = 1101
    flow_shift: float = 12.0
    audio_flow_shift: float = 3.0

    def fields(self) -> dict[str, str]:
        """The text parts of its form."""
        extra = f'{{"task":"{self.task}","audio_flow_shift":{self.audio_flow_shift}{self._frame_indices()}}}'
        return {
            "prompt": self.prompt,
            "size": f"{self.width}x{self.height}",
            "num_frames": str(self.num_frames),
            "fps": "24",
            "num_inference_steps": str(self.num_inference_steps),
            "flow_shift": str(self.flow_shift),
            "seed": str(self.seed),
            "extra_params": extra,
        }

    def parts(self, folder: Path) -> list[FilePart]:
        """The file parts of its form, in request order."""
        return [file_part(folder / medium.file) for medium in self.media]

    def as_json(self) -> dict[str, object]:
        """What the reference program reads."""
        return asdict(self)

    def _frame_indices(self) -> str:
        indices = [0 if medium.role == "first" else -1 for medium in self.media if medium.role != "reference"]
        return f',"frame_indices":{indices}' if indices else ""


def clip_from_json(values: dict[str, Any]) -> Clip:
    """The opposite of `Clip.as_json`."""
    return Clip(**{**values, "media": tuple(Medium(**medium) for medium in values["media"])})


def form(fields: Mapping[str, str], parts: Iterable[FilePart] = ()) -> list[Part]:
    """Text and files as one multipart form, text first."""
    return [*((name, (None, value)) for name, value in fields.items()), *parts]


def file_part(path: Path, field: str = "input_references") -> FilePart:
    """One file as a part of a multipart form."""
    return (field, (path.name, path.read_bytes(), CONTENT_TYPES.get(path.suffix, "application/octet-stream")))


FIRST = Medium("img_quad.png", role="first")
LAST = Medium("img_exif6.jpg", role="last")
PICTURE = Medium("img_odd.png")
VIDEO = Medium("vid_24fps.mp4", "video")
SILENT_VIDEO = Medium("vid_noaudio.mp4", "video")
VOICE = Medium("aud_stereo_32k.wav", "audio")

TEXT = Clip("t2va", "t2va", "a red ball rolls over grass")
EQUAL_CLIPS: tuple[Clip, ...] = (
    TEXT,
    Clip("fl2va_first", "fl2va", "the picture comes alive", (FIRST,), height=32, width=64),
    Clip("fl2va_last", "fl2va", "and ends here", (LAST,), seed=7, flow_shift=6.0, audio_flow_shift=2.0),
    Clip("fl2va_both", "fl2va", "from the first to the last", (FIRST, LAST), height=64, width=96, num_frames=124),
    Clip("ref2va_image", "ref2va", "<Picture 1> in the rain", (PICTURE,)),
    Clip("ref2va_video", "ref2va", "like <Video 1> with <Audio 1>", (VIDEO,), num_frames=124),
    Clip("ref2va_silent_video", "ref2va", "like <Video 1>", (SILENT_VIDEO,)),
    Clip("ref2va_image_audio", "ref2va", "<Picture 1> speaks with <Audio 1>", (PICTURE, VOICE)),
    Clip("ref2va_mixed", "ref2va", "<Picture 1>, <Video 1> and <Audio 2>", (PICTURE, VIDEO, VOICE)),
    Clip("ref2va_reordered", "ref2va", "<Picture 1>, <Video 1> and <Audio 2>", (VOICE, VIDEO, PICTURE)),
)
"""The ten requests of the promise: equal to the reference, bit for bit."""
ONE_OF_EACH_TASK = [clip for clip in EQUAL_CLIPS if clip.name in ("t2va", "fl2va_both", "ref2va_mixed")]

HARD_MEDIA: tuple[Clip, ...] = (
    Clip(
        "ref2va_turned_30fps_mono",
        "ref2va",
        "a phone's files",
        (
            Medium("vid_30fps.mp4", "video"),
            Medium("img_exif6.jpg"),
            Medium("aud_mono_96k.wav", "audio"),
            Medium("vid_rot90.mp4", "video"),
        ),
        num_frames=124,
    ),
    Clip("ref2va_slow_video", "ref2va", "twelve frames a second", (Medium("vid_12fps.mp4", "video"),), num_frames=124),
)
"""Files that must be turned or put on 24 frames a second before they mean the same."""
