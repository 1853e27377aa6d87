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
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from PIL import Image

from shared_runtime.conditioning import references
from shared_runtime.conditioning.blocks import assemble, run_block
from shared_runtime.conditioning.references import Decoded, decode_ahead
from shared_runtime.media import decode_image
from shared_runtime.tiny import tiny_checkpoint
from shared_schema.encode import EncodeRequest, ReferenceInput, ReferenceKind
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import CanvasLimits, Task

LIMITS = CanvasLimits(64, 64 * 112, 64)
MIXED = ("vid_24fps.mp4", "img_quad.png", "vid_portrait.mp4", "img_odd.png")


def request_of(files: tuple[Path, ...], task: Task = Task.REF2VA) -> EncodeRequest:
    def kind(path: Path) -> ReferenceKind:
        return "video" if path.suffix == ".mp4" else "image"

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


@pytest.mark.parametrize("name", ["img_quad.png", "img_odd.png", "img_gray.png"])
def test_a_picture_that_was_sized_while_others_were_decoded_is_the_one_that_diffusers_makes(
    cases: Path, name: str
) -> None:
    step, path = MiniMaxH3Ref2VASetupStep(), cases / name
    pipeline = assemble(tiny_checkpoint(), {"size": step}, {}, torch.device("cpu"))
    (decoded,) = decode((path,))
    sized = decoded.reference.image
    state = PipelineState()
    whole = MiniMaxH3ImageReference(image=Image.fromarray(decode_image(path)))
    for key, value in {"prompt": "a", "height": 64, "width": 64, "num_frames": 107, "references": [whole]}.items():
        state.set(key, value)
    run_block(step, pipeline, state)
    (wanted,) = state.get("normalized_references")
    assert np.array_equal(np.asarray(sized), np.asarray(wanted.image))
    assert min(sized.size) == LIMITS.reference_short_edge


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
