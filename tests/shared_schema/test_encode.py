import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared_schema.encode import (
    EncodeRequest,
    InlineLanding,
    Landing,
    NixlLanding,
    PushReceipt,
    PushRequest,
    ShmLanding,
)
from shared_schema.tasks import Task

LANDING = ShmLanding(
    path="/dev/shm/h3/a.slab", offset=4096, length=512, generation=1, request_id="0" * 32, deadline=1.5
)
OVER_NIXL = NixlLanding(
    owner="host:8000",
    agent="h3-1",
    metadata="AAAA",
    address=2**47,
    length=512,
    generation=1,
    request_id="0" * 32,
    seconds_left=60.0,
)
REQUEST = EncodeRequest(request_id="f" * 32, task=Task.T2VA, prompt="a ball", height=768, width=1344, num_frames=124)


@pytest.mark.parametrize("landing", [LANDING, OVER_NIXL, InlineLanding()])
def test_a_landing_keeps_its_kind_on_the_wire(landing: Landing) -> None:
    sent = PushRequest(landing=landing).model_dump_json()
    assert PushRequest.model_validate_json(sent).landing == landing


def test_an_encode_request_survives_the_wire() -> None:
    assert EncodeRequest.model_validate_json(REQUEST.model_dump_json()) == REQUEST


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "nixl"),  # whose fields are others
        ("kind", None),
        ("offset", -1),
        ("length", -1),
        ("generation", 0),
        ("request_id", "0" * 31),
        ("request_id", "G" * 32),
        ("request_id", "0" * 32 + "\n"),
        ("pickle", "x"),
    ],
)
def test_a_landing_that_breaks_a_rule_is_refused(field: str, value: object) -> None:  # case 44
    with pytest.raises(ValidationError):
        PushRequest.model_validate({"landing": {**LANDING.model_dump(), field: value}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", -1),
        ("address", 2**64),
        ("seconds_left", 0),
        ("metadata", "A" * 70_000),
        ("agent", ""),
        ("pickle", "x"),
    ],
)
def test_a_nixl_landing_that_breaks_a_rule_is_refused(field: str, value: object) -> None:  # case 44
    with pytest.raises(ValidationError):
        PushRequest.model_validate({"landing": {**OVER_NIXL.model_dump(), field: value}})


@pytest.mark.parametrize("checksum", ["", "0" * 15, "0" * 17, "G" * 16, "0x" + "0" * 14])
def test_a_checksum_is_16_hex_digits(checksum: str) -> None:
    with pytest.raises(ValidationError):
        PushReceipt(bytes=1, checksum=checksum, seconds=0.1)


@given(st.sampled_from(sorted(EncodeRequest.model_fields)))
def test_a_needed_field_left_out_or_an_unknown_one_is_refused(name: str) -> None:
    fields = REQUEST.model_dump()
    with pytest.raises(ValidationError, match="zzz"):
        EncodeRequest.model_validate({**fields, "zzz": 1})
    if EncodeRequest.model_fields[name].is_required():
        del fields[name]
        with pytest.raises(ValidationError, match=name):
            EncodeRequest.model_validate(fields)
