"""The files of a request are decoded beside each other, each once, and are what they would be one after the other."""

import threading
from collections import Counter
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
from shared_runtime.conditioning.references import decode_media
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


def test_several_files_are_what_each_is_by_itself(cases: Path) -> None:
    files = tuple(cases / name for name in MIXED)
    together = decode_media(request_of(files), files, LIMITS, lambda: None)
    for number, path in enumerate(files):
        alone = decode_media(request_of((path,)), (path,), LIMITS, lambda: None)
        one, other = together.references[number], alone.references[0]
        if path.suffix == ".mp4":
            assert np.array_equal(one.frames, other.frames)
        else:
            assert np.array_equal(np.asarray(one.image), np.asarray(other.image))
        assert together.used[number] == alone.used[0].model_copy(update={"index": number})


def test_beats_belong_to_the_thread_that_waits(cases: Path) -> None:
    files = tuple(cases / name for name in MIXED)
    beats: Counter[str] = Counter()
    decode_media(request_of(files), files, LIMITS, lambda: beats.update([threading.current_thread().name]))
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
            decode_media(request_of(files), files, LIMITS, lambda: None)
        assert raised.value.param == "input_references[1]"


def test_files_are_decoded_at_the_same_time(cases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=20)

    def decode(path: Path, **more: Any) -> Any:
        together.wait()
        return decode_image(path, **more)

    monkeypatch.setattr(references, "decode_image", decode)
    files = (cases / "img_quad.png", cases / "img_odd.png")
    assert len(decode_media(request_of(files), files, LIMITS, lambda: None).pictures) == 2


def test_who_leaves_ends_the_decoding_at_its_next_frame(cases: Path) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    files = (cases / "vid_60fps.mp4",) * 4
    with pytest.raises(KeyboardInterrupt):
        decode_media(request_of(files), files, LIMITS, leave)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("media")]


@pytest.mark.parametrize("name", ["img_quad.png", "img_odd.png", "img_gray.png"])
def test_a_picture_that_was_sized_while_others_were_decoded_is_the_one_that_diffusers_makes(
    cases: Path, name: str
) -> None:
    step, path = MiniMaxH3Ref2VASetupStep(), cases / name
    pipeline = assemble(tiny_checkpoint(), {"size": step}, {}, torch.device("cpu"))
    (sized,) = decode_media(request_of((path,)), (path,), LIMITS, lambda: None).pictures
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
    request = request_of((path,), Task.FL2VA)
    (picture,) = decode_media(request, (path,), LIMITS, lambda: None).pictures
    assert np.array_equal(np.asarray(picture), decode_image(path))
