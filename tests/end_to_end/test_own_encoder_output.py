"""A client's own `encoder_output`: fetched inline from the encoder, posted in place of prompt and media."""

import json
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.clips import EQUAL_CLIPS, TEXT, Clip
from tests.end_to_end.pair import Pair

TEXT_SLOT = "hidden_states.output"
ROLES_SLOT = "meta.token_role_ids"


@pytest.fixture(scope="module")
def encoder(pair: Pair) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pair.encoder.url, timeout=60) as client:
        yield client


def encode(encoder: httpx.Client, clip: Clip, folder: Path) -> bytes:
    """The clip's conditioning as a safetensors file, through `push` with an inline landing."""
    request = {
        "request_id": uuid.uuid4().hex,
        "task": clip.task,
        "prompt": clip.prompt,
        "height": clip.height,
        "width": clip.width,
        "num_frames": clip.num_frames,
        "keyframes": [0 if medium.role == "first" else -1 for medium in clip.media if medium.role != "reference"],
        "references": [{"kind": medium.kind} for medium in clip.media],
    }
    parts = [("request", (None, json.dumps(request), "application/json"))]
    files = [("file", part) for _, part in clip.parts(folder)]
    answer = encoder.post("/v1/encodings", files=[*parts, *files])
    assert answer.status_code == 200, answer.text
    encoding = answer.json()
    pushed = httpx.post(
        f"{encoding['endpoint']}/v1/encodings/{encoding['id']}/push", json={"landing": {"kind": "inline"}}, timeout=60
    )
    assert pushed.status_code == 200, pushed.text
    gone = encoder.post(f"/v1/encodings/{encoding['id']}/push", json={"landing": {"kind": "inline"}})
    assert gone.status_code in (404, 410), "the encoder's copy is gone with the push"
    return pushed.content


def fields(clip: Clip) -> dict[str, str]:
    """What decides the clip besides its conditioning."""
    names = ("num_inference_steps", "flow_shift", "seed")
    kept = {name: value for name, value in clip.fields().items() if name in names}
    return {**kept, "extra_params": json.dumps({"audio_flow_shift": clip.audio_flow_shift})}


def part(payload: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    """The payload as the form's file."""
    return [("encoder_output", ("encoder_output.safetensors", payload, "application/octet-stream"))]


@pytest.mark.parametrize("clip", [EQUAL_CLIPS[0], EQUAL_CLIPS[3], EQUAL_CLIPS[8]], ids=lambda clip: clip.name)
def test_it_makes_the_clip_that_prompt_and_media_make(
    pair: Pair, encoder: httpx.Client, cases: Path, clip: Clip
) -> None:
    usual = pair.submit(clip.fields(), clip.parts(cases))
    own = pair.submit(fields(clip), part(encode(encoder, clip, cases)))
    expected, made = pair.completed(usual), pair.completed(own)
    for name in ("frames_sha256", "audio_sha256", "size", "num_frames", "task"):
        assert made[name] == expected[name]


def test_a_size_that_disagrees_with_the_layout_is_refused(pair: Pair, encoder: httpx.Client, cases: Path) -> None:
    payload = encode(encoder, TEXT, cases)
    answer = pair.post({**fields(TEXT), "size": "128x64"}, part(payload))
    assert answer.status_code == 400, answer.text


def test_a_slot_that_breaks_a_rule_is_refused_by_name(pair: Pair, encoder: httpx.Client, cases: Path) -> None:
    payload = encode(encoder, TEXT, cases)
    header_bytes = struct.unpack("<Q", payload[:8])[0]
    header = json.loads(payload[8 : 8 + header_bytes])

    def with_bytes(slot: str, value: bytes) -> bytes:
        begin = 8 + header_bytes + header[slot]["data_offsets"][0]
        return payload[:begin] + value + payload[begin + len(value) :]

    broken = {
        "a role of 2": (ROLES_SLOT, with_bytes(ROLES_SLOT, struct.pack("<q", 2))),
        "a NaN in the text": (TEXT_SLOT, with_bytes(TEXT_SLOT, b"\xc0\x7f")),
    }
    jobs = pair.job_count()
    for rule, (slot, data) in broken.items():
        answer = pair.post(fields(TEXT), part(data))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "encoder_output"), rule
        assert slot in error["message"], rule
    for rule, data in {"cut": payload[:-1], "empty": b"", "a hostile length": b"\xff" * 8 + payload[8:]}.items():
        answer = pair.post(fields(TEXT), part(data))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "encoder_output"), rule
    assert pair.job_count() == jobs
    assert pair.unfinished_files() == []


def test_finite_values_that_overflow_inside_the_model_fail_the_job_as_numerical_error(
    pair: Pair, encoder: httpx.Client, cases: Path
) -> None:
    payload = bytearray(encode(encoder, TEXT, cases))
    header_bytes = struct.unpack("<Q", payload[:8])[0]
    begin, end = json.loads(payload[8 : 8 + header_bytes])[TEXT_SLOT]["data_offsets"]
    largest = b"\x7f\x7f"
    payload[8 + header_bytes + begin : 8 + header_bytes + end] = largest * ((end - begin) // 2)
    video = pair.wait_final(pair.submit(fields(TEXT), part(bytes(payload))))
    assert (video["status"], video["error"]["code"]) == ("failed", "numerical_error")  # type: ignore[index]
    pair.completed(pair.submit(TEXT.fields()))


def test_an_encoding_can_be_dropped(encoder: httpx.Client) -> None:
    request = {
        "request_id": uuid.uuid4().hex,
        "task": "t2va",
        "prompt": "x",
        "height": 64,
        "width": 64,
        "num_frames": 107,
    }
    answer = encoder.post("/v1/encodings", files=[("request", (None, json.dumps(request), "application/json"))])
    encoding = answer.json()
    assert encoder.delete(f"/v1/encodings/{encoding['id']}").status_code in (200, 204)
    push = encoder.post(f"/v1/encodings/{encoding['id']}/push", json={"landing": {"kind": "inline"}})
    assert push.status_code in (404, 410)
