"""The files of a request are decoded beside each other, each once, and are what they would be one after the other."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines import PipelineState
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference, MiniMaxH3VideoReference
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from PIL import Image

from shared_runtime.conditioning import references
from shared_runtime.conditioning.blocks import assemble, run_block
from shared_runtime.conditioning.references import Decoded, decode_ahead
from shared_runtime.media import decode_image, decode_video
from shared_runtime.tiny import tiny_checkpoint
from shared_schema.encode import EncodeRequest, ReferenceInput, ReferenceKind
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import SAMPLE_RATE, CanvasLimits, Task, canvas_for_ratio
from tests.cases.videos import Recipe, constant, hide_frames, write_video

LIMITS = CanvasLimits(64, 64 * 112, 64)
MIXED = ("vid_24fps.mp4", "img_quad.png", "vid_portrait.mp4", "img_odd.png")


def request_of(files: tuple[Path, ...], task: Task = Task.REF2VA) -> EncodeRequest:
    def kind(path: Path) -> ReferenceKind:
        return "video" if path.suffix in (".mp4", ".webm") else "image"

    return EncodeRequest(
        request_id="0" * 32,
        task=task,
        prompt="a",
        height=64,
        width=64,
        num_frames=107,
        references=tuple(ReferenceInput(kind=kind(path)) for path in files),
    )


def decode(files: tuple[Path, ...], beat: Callable[[], None] = lambda: None, task: Task = Task.REF2VA) -> list[Decoded]:
    with decode_ahead(request_of(files, task), files, LIMITS) as ahead:
        return [ahead.take(beat) for _ in files]


def test_several_files_are_what_each_is_by_itself(cases: Path) -> None:
    files = tuple(cases / name for name in MIXED)
    for number, (path, together) in enumerate(zip(files, decode(files), strict=True)):
        (alone,) = decode((path,))
        one, other = together.reference, alone.reference
        if path.suffix == ".mp4":
            assert np.array_equal(one.frames, other.frames)
        else:
            assert np.array_equal(np.asarray(one.image), np.asarray(other.image))
        assert together.used == alone.used.model_copy(update={"index": number})


@pytest.mark.steady
def test_beats_belong_to_the_thread_that_waits(cases: Path) -> None:
    files = tuple(cases / name for name in MIXED)
    beats: Counter[str] = Counter()
    decode(files, lambda: beats.update([threading.current_thread().name]))
    assert beats.keys() == {threading.current_thread().name}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("media")]


def test_of_two_files_that_cannot_be_decoded_the_first_one_is_named(cases: Path, tmp_path: Path) -> None:
    broken = []
    for number in range(2):
        broken.append(tmp_path / f"{number}.mp4")
        broken[-1].write_bytes((cases / "vid_24fps.mp4").read_bytes()[: 4000 * (2 - number)])
    files = (cases / "vid_24fps.mp4", *broken)
    for _ in range(3):
        with pytest.raises(InvalidRequest) as raised:
            decode(files)
        assert raised.value.param == "input_references[1]"


def test_a_video_that_shows_less_than_it_announced_is_refused(cases: Path, tmp_path: Path) -> None:
    path = tmp_path / "hidden.webm"
    hide_frames(cases / "vid_webm.webm", path, {0, 14})
    with pytest.raises(InvalidRequest, match=r"lasts at least 2 seconds, this one 0\.625") as raised:
        decode((path,))
    assert raised.value.param == "input_references[0]"


def test_files_are_decoded_at_the_same_time(cases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=20)

    def waiting(path: Path, **more: Any) -> Any:
        together.wait()
        return decode_image(path, **more)

    monkeypatch.setattr(references, "decode_image", waiting)
    assert len(decode((cases / "img_quad.png", cases / "img_odd.png"))) == 2


@pytest.mark.steady
def test_who_leaves_ends_the_decoding_at_its_next_frame(cases: Path) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode((cases / "vid_60fps.mp4",) * 4, leave)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("media")]


def as_diffusers_sizes(whole: Any) -> Any:
    """A reference that nobody has sized yet, after diffusers' own step."""
    step = MiniMaxH3Ref2VASetupStep()
    pipeline = assemble(tiny_checkpoint(), {"size": step}, {}, torch.device("cpu"))
    state = PipelineState()
    for key, value in {"prompt": "a", "height": 64, "width": 64, "num_frames": 107, "references": [whole]}.items():
        state.set(key, value)
    run_block(step, pipeline, state)
    (sized,) = state.get("normalized_references")
    return sized


@pytest.mark.parametrize("name", ["img_quad.png", "img_odd.png", "img_gray.png"])
def test_a_picture_that_was_sized_while_others_were_decoded_is_the_one_that_diffusers_makes(
    cases: Path, name: str
) -> None:
    (decoded,) = decode((cases / name,))
    sized = decoded.reference.image
    wanted = as_diffusers_sizes(MiniMaxH3ImageReference(image=Image.fromarray(decode_image(cases / name))))
    assert np.array_equal(np.asarray(sized), np.asarray(wanted.image))
    assert min(sized.size) == LIMITS.reference_short_edge


@pytest.mark.parametrize("width", [448, 768])
def test_a_video_is_put_on_its_canvas_once_frame_by_frame(tmp_path: Path, width: int) -> None:
    path = tmp_path / "wide.mp4"
    write_video(path, Recipe(constant(24, 2), width=width, height=256, sound_seconds=2.0))
    (decoded,) = decode((path,))
    frames = decoded.reference.frames
    canvas = canvas_for_ratio(width, 256, LIMITS)
    # 3:1 gives a canvas whose own ratio would give another one.
    assert (canvas_for_ratio(canvas.width, canvas.height, LIMITS) == canvas) is (width == 448)
    assert frames.shape == (48, canvas.height, canvas.width, 3)
    whole = decode_video(path, max_frames=107, use_audio=True)
    wanted = as_diffusers_sizes(
        MiniMaxH3VideoReference(
            frames=whole.frames, fps=24.0, audio=torch.from_numpy(whole.waveform), sample_rate=SAMPLE_RATE
        )
    )
    assert np.array_equal(frames, wanted.frames)
    assert torch.equal(decoded.reference.audio, wanted.audio)
    foreseen = references._held_bytes(ReferenceInput(kind="video"), path, request_of((path,)), LIMITS)
    assert frames.nbytes <= foreseen <= frames.nbytes + frames[0].nbytes


def test_keyframes_are_left_to_the_step_that_knows_the_canvas(cases: Path) -> None:
    path = cases / "img_quad.png"
    (decoded,) = decode((path,), task=Task.FL2VA)
    assert np.array_equal(np.asarray(decoded.reference.image), decode_image(path))


FORESEEN = (
    *("img_quad.png", "img_gray16.png", "img_cmyk.jpg", "img_anim.gif", "img_exif6.jpg", "vid_24fps.mp4"),
    *("vid_60fps.mp4", "vid_portrait.mp4", "vid_12fps.mp4"),
)


@pytest.mark.parametrize("name", FORESEEN)
def test_what_a_file_will_take_is_known_from_its_header(cases: Path, name: str) -> None:
    path, limits = cases / name, CanvasLimits(192, 192 * 336, 96)
    request = request_of((path,))
    request = request.model_copy(update={"num_frames": 362})
    foreseen = references._held_bytes(request.references[0], path, request, limits)
    with decode_ahead(request, (path,), limits) as ahead:
        decoded = ahead.take(lambda: None)
    if decoded.reference.kind == "image":
        stored = decode_image(path)
        assert foreseen == stored.nbytes + np.asarray(decoded.reference.image).nbytes
    else:
        frames = decoded.reference.frames
        assert frames.nbytes <= foreseen <= frames.nbytes + 2 * frames[0].nbytes


def test_a_file_whose_header_says_nothing_is_left_to_its_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(InvalidRequest, match="its header is damaged"):
        decode((path,))
