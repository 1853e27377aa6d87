import json
import struct
import tracemalloc
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from shared_runtime.transport.codec import check_values
from shared_runtime.transport.inline import from_safetensors, to_safetensors
from shared_schema import errors
from shared_schema.encoder_output import AUDIO, LAYOUT, ROLES, SLOT_DTYPES, TEXT, VISUAL, Layout, SlotName
from shared_schema.errors import PayloadError
from tests.payloads import GOLDEN_T2VA, SMALL_REF2VA, TEXT_DIM, layouts, payload_of, slots_of

FILE = to_safetensors(payload_of(SMALL_REF2VA))


def split(blob: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", blob)
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def joined(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@given(layouts(), st.integers(1, 9))
def test_reading_undoes_writing(layout: Layout, tokens: int) -> None:
    payload = payload_of(layout, tokens=tokens)
    read = from_safetensors(to_safetensors(payload))
    assert read.manifest == payload.manifest
    assert read.data == payload.data
    check_values(read)


def test_the_file_is_what_the_library_reads() -> None:
    slots = slots_of(SMALL_REF2VA)
    read = dict(safetensors.deserialize(FILE))  # type: ignore[no-untyped-call]
    assert {name: entry["dtype"] for name, entry in read.items()} == SLOT_DTYPES
    for name, array in slots.items():
        assert (read[name]["shape"], bytes(read[name]["data"])) == (list(array.shape), array.tobytes())
    assert bytes(read[LAYOUT]["data"]) == struct.pack(f"<{len(SMALL_REF2VA.pack())}q", *SMALL_REF2VA.pack())


def test_a_file_of_the_library_in_any_order_with_metadata_is_read() -> None:
    slots = slots_of(SMALL_REF2VA)
    header, body = split(FILE)
    raw = {name: body[slice(*header[name]["data_offsets"])] for name in header}
    order, cursor, parts = [AUDIO, LAYOUT, VISUAL, TEXT, ROLES], 0, []
    mixed: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name in order:
        mixed[name] = {**header[name], "data_offsets": [cursor, cursor + len(raw[name])]}
        cursor += len(raw[name])
        parts.append(raw[name])
    read = from_safetensors(joined(mixed, b"".join(parts)))
    assert read.data == payload_of(SMALL_REF2VA).data
    assert read.view(AUDIO) == slots[AUDIO].tobytes()


def test_empty_rows_and_a_column_of_roles_mean_the_same() -> None:
    header, body = split(to_safetensors(payload_of(GOLDEN_T2VA)))
    header[VISUAL]["shape"], header[AUDIO]["shape"], header[ROLES]["shape"] = [0, 96], [0, 32], [5, 1]
    read = from_safetensors(joined(header, body))
    assert read.data == payload_of(GOLDEN_T2VA).data


def test_version_3_words_stay_version_3() -> None:
    header, body = split(to_safetensors(payload_of(GOLDEN_T2VA)))
    begin, _ = header[LAYOUT]["data_offsets"]
    third = body[: begin + 8] + struct.pack("<q", 3) + body[begin + 16 :]
    assert from_safetensors(joined(header, third)).manifest.layout[:2] == (1, 3)


def test_the_text_only_split_reads_two_slots_and_only_where_it_is_expected() -> None:
    header, body = split(FILE)
    two = {name: header[name] for name in (TEXT, ROLES)}
    end = max(entry["data_offsets"][1] for entry in two.values())
    blob = joined(two, body[:end])
    assert from_safetensors(blob, text_only=True).layout is None
    with pytest.raises(errors.SlotMissing):
        from_safetensors(blob)
    with pytest.raises(errors.SlotUnexpected):
        from_safetensors(FILE, text_only=True)


@pytest.mark.parametrize("name", list(SLOT_DTYPES))
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dtype": "F16"}, errors.WrongDtype),
        ({"dtype": "F8_E4M3"}, errors.WrongDtype),
        ({"dtype": 5}, errors.WrongBytes),
        ({"shape": []}, errors.WrongBytes),
        ({"shape": [-1]}, errors.WrongShape),
        ({"shape": [1.5]}, errors.WrongShape),
        ({"shape": [True]}, errors.WrongShape),
        ({"shape": [10**30]}, errors.WrongShape),
        ({"shape": [1, 1, 1]}, errors.WrongShape),
        ({"shape": "x"}, errors.WrongBytes),
        ({"shape": [2**20, 2**20]}, errors.WrongBytes),
        ({"data_offsets": [0]}, errors.WrongBytes),
        ({"data_offsets": [-8, 0]}, errors.WrongBytes),
        ({"data_offsets": [0, 2**62]}, errors.WrongBytes),
        ({"data_offsets": ["0", "8"]}, errors.WrongBytes),
        ({"pickle": "x"}, errors.WrongBytes),
    ],
)
def test_a_hostile_entry_is_refused_by_name(
    name: SlotName, change: dict[str, Any], error: type[PayloadError]
) -> None:  # cases 43, 44
    header, body = split(FILE)
    header[name] = {**header[name], **change}
    with pytest.raises(error) as refused:
        from_safetensors(joined(header, body))
    assert refused.value.slot == name


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x00" * 7,
        b"\x00" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 4 * 2**30) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        joined(b"[]", b""),
        joined(b"nope", b""),
        joined(b"\xff\xfe", b""),
        joined(b"[" * 60_000, b""),
        joined(b'{"a":1,"a":1}', b""),
        b"\x80\x04\x95" + b"\x00" * 64,
    ],
)
def test_what_is_no_safetensors_file_is_refused(blob: bytes) -> None:  # case 44
    with pytest.raises((errors.WrongBytes, errors.SlotMissing)):
        from_safetensors(blob)


def test_a_slot_left_out_or_added_is_refused() -> None:  # case 43
    header, body = split(FILE)
    for name in SLOT_DTYPES:
        with pytest.raises(errors.SlotMissing) as missing:
            from_safetensors(joined({key: value for key, value in header.items() if key != name}, body))
        assert missing.value.slot == name
    extra = {"dtype": "F32", "shape": [0], "data_offsets": [len(body), len(body)]}
    with pytest.raises(errors.SlotUnexpected):
        from_safetensors(joined({**header, "x": extra}, body))


def test_gaps_overlaps_and_missing_bytes_are_refused() -> None:
    header, body = split(FILE)
    with pytest.raises(errors.WrongBytes):
        from_safetensors(joined(header, body[:-1]))
    with pytest.raises(errors.WrongBytes):
        from_safetensors(joined(header, body + b"\x00"))
    begin, end = header[ROLES]["data_offsets"]
    with pytest.raises(errors.WrongBytes):
        from_safetensors(joined({**header, ROLES: {**header[ROLES], "data_offsets": [begin - 8, end - 8]}}, body))


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_one_changed_byte_is_refused_or_is_a_value(at: int, flip: int) -> None:
    """Whatever one byte does, the answer is a payload whose geometry is unchanged, or a typed error."""
    changed = bytearray(FILE)
    changed[at] ^= flip
    try:
        read = from_safetensors(bytes(changed))
    except PayloadError:
        return
    assert read.layout is not None
    assert [slot.shape for slot in read.manifest.slots] == [s.shape for s in payload_of(SMALL_REF2VA).manifest.slots]


@pytest.mark.steady
def test_a_lie_about_sizes_costs_no_memory() -> None:  # case 44
    header, body = split(FILE)
    header[TEXT] = {"dtype": "BF16", "shape": [2**28, TEXT_DIM], "data_offsets": [0, 2**28 * TEXT_DIM * 2]}
    blob = joined(header, body)
    tracemalloc.start()
    with pytest.raises(errors.WrongBytes):
        from_safetensors(blob)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
