from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_schema import errors
from shared_schema.encoder_output import (
    AUDIO,
    LAYOUT,
    ROLES,
    SLOT_DTYPES,
    TEXT,
    VISUAL,
    EncoderOutput,
    Layout,
    Manifest,
    SlotName,
)
from tests.payloads import GOLDEN_FL2VA, GOLDEN_T2VA, SMALL_REF2VA, TEXT_DIM, layouts, payload_of

SLOTS = st.sampled_from(list(SLOT_DTYPES))


def changed(manifest: Manifest, which: SlotName, **fields: Any) -> Manifest:
    """The manifest with some fields of one slot changed, unchecked."""
    slots = tuple(s.model_copy(update=fields) if s.name == which else s for s in manifest.slots)
    return manifest.model_copy(update={"slots": slots})


@given(layouts(), st.integers(1, 9))
def test_a_planned_manifest_survives_json(layout: Layout, tokens: int) -> None:
    manifest = payload_of(layout, tokens=tokens).manifest
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert Layout.unpack(manifest.layout) == layout
    manifest.check()


def test_a_text_only_request_carries_the_whole_schema_with_empty_media() -> None:
    manifest = payload_of(GOLDEN_T2VA).manifest
    assert [slot.name for slot in manifest.slots] == list(SLOT_DTYPES)
    assert manifest.slot(VISUAL).shape == manifest.slot(AUDIO).shape == (0,)


def test_the_golden_payload_has_its_rows() -> None:
    manifest = payload_of(GOLDEN_FL2VA).manifest
    assert (manifest.slot(VISUAL).shape, manifest.slot(AUDIO).shape) == ((2016, 96), (0,))


@given(layouts(), SLOTS)
def test_a_slot_left_out_or_doubled_is_refused(layout: Layout, name: SlotName) -> None:  # case 43
    manifest = payload_of(layout).manifest
    without = tuple(slot for slot in manifest.slots if slot.name != name)
    with pytest.raises(errors.SlotMissing) as missing:
        manifest.model_copy(update={"slots": without}).check()
    assert missing.value.slot == name
    with pytest.raises(errors.SlotUnexpected):
        manifest.model_copy(update={"slots": (*manifest.slots, manifest.slot(name))}).check()
    with pytest.raises((errors.SlotMissing, errors.SlotUnexpected)):
        changed(manifest, name, name="latents.noise").check()


@given(layouts(), SLOTS, st.sampled_from(["BF16", "F32", "I64", "F16", "bool", ""]))
def test_another_dtype_is_refused(layout: Layout, name: SlotName, dtype: str) -> None:  # case 43
    manifest = payload_of(layout).manifest
    if dtype != SLOT_DTYPES[name]:
        with pytest.raises(errors.WrongDtype) as wrong:
            changed(manifest, name, dtype=dtype).check()
        assert wrong.value.slot == name


@given(layouts(), SLOTS, st.data())
def test_one_changed_extent_is_refused(layout: Layout, name: SlotName, data: st.DataObject) -> None:  # case 43
    manifest = payload_of(layout).manifest
    shape = list(manifest.slot(name).shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] += data.draw(st.integers(-3, 3).filter(bool))
    with pytest.raises((errors.WrongShape, errors.WrongBytes, errors.RowsMismatch)) as wrong:
        changed(manifest, name, shape=tuple(shape)).check()
    assert wrong.value.slot == name


@given(layouts(), st.sampled_from([TEXT, VISUAL, AUDIO, ROLES]), st.integers(-2, 2).filter(bool))
def test_rows_that_the_layout_does_not_imply_are_refused(layout: Layout, name: SlotName, more: int) -> None:
    """Shape and bytes agree with each other here, so only the count can be wrong."""  # case 43
    manifest = payload_of(layout).manifest
    shapes = {slot.name: slot.shape for slot in manifest.slots if slot.name != LAYOUT}
    width = {TEXT: (TEXT_DIM,), ROLES: (), VISUAL: (96,), AUDIO: (32,)}[name]
    rows = shapes[name][0] + more
    shapes[name] = (rows, *width)
    expected = errors.WrongShape if rows < 0 or (rows == 0 and name in (VISUAL, AUDIO)) else errors.RowsMismatch
    with pytest.raises(expected):
        Manifest.plan(shapes, layout)  # type: ignore[arg-type]


@given(layouts(), SLOTS, st.integers(-128, 128).filter(bool))
def test_a_slot_out_of_place_is_refused(layout: Layout, name: SlotName, shift: int) -> None:
    manifest = payload_of(layout).manifest
    spec = manifest.slot(name)
    for wrong in (
        changed(manifest, name, offset=spec.offset + shift),
        changed(manifest, name, nbytes=spec.nbytes + shift),
        manifest.model_copy(update={"nbytes": manifest.nbytes + shift}),
    ):
        with pytest.raises(errors.WrongBytes):
            wrong.check()


@given(layouts(), st.data())
def test_one_changed_word_in_manifest_or_bytes_is_refused(layout: Layout, data: st.DataObject) -> None:
    payload = payload_of(layout)
    words = list(payload.manifest.layout)
    words[data.draw(st.integers(0, len(words) - 1))] += data.draw(st.sampled_from([-1, 1, 32]))
    with pytest.raises((errors.LayoutInvalid, errors.UnknownSchema, errors.RowsMismatch)):
        EncoderOutput(manifest=payload.manifest.model_copy(update={"layout": tuple(words)}), data=payload.data)
    broken = bytearray(payload.data)
    spec = payload.manifest.slot(LAYOUT)
    broken[spec.offset + data.draw(st.integers(0, spec.nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(errors.LayoutInvalid):
        EncoderOutput(manifest=payload.manifest, data=memoryview(broken))


def test_bytes_that_are_too_few_or_not_plain_are_refused() -> None:
    payload = payload_of(SMALL_REF2VA)
    for wrong in (payload.data[:-1], payload.data[::-1], payload.data[:0], payload.data.cast("B").cast("I")):
        with pytest.raises(errors.WrongBytes):
            EncoderOutput(manifest=payload.manifest, data=wrong)


def test_more_memory_than_the_payload_needs_is_fine() -> None:
    payload = payload_of(SMALL_REF2VA)
    longer = memoryview(bytearray(payload.data) + bytearray(100))
    assert EncoderOutput(manifest=payload.manifest, data=longer).layout == SMALL_REF2VA


def test_roles_may_be_a_column() -> None:
    manifest = payload_of(GOLDEN_T2VA).manifest
    changed(manifest, ROLES, shape=(5, 1)).check()


def test_a_text_only_payload_has_two_slots_and_no_layout() -> None:
    manifest = Manifest.plan({TEXT: (3, TEXT_DIM), ROLES: (3,)}, None)
    assert [slot.name for slot in manifest.slots] == [TEXT, ROLES]
    assert EncoderOutput(manifest=manifest, data=memoryview(bytes(manifest.nbytes))).layout is None
    with pytest.raises(errors.LayoutInvalid):
        manifest.model_copy(update={"layout": GOLDEN_T2VA.pack()}).check()
    with pytest.raises(errors.SlotUnexpected):
        payload_of(GOLDEN_T2VA).manifest.model_copy(update={"text_only": True}).check()
    with pytest.raises(errors.SlotMissing):
        manifest.model_copy(update={"text_only": False}).check()
