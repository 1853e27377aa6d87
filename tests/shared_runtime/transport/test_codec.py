import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared_runtime.transport import codec
from shared_schema import errors
from shared_schema.encoder_output import AUDIO, ROLES, SLOT_DTYPES, TEXT, VISUAL, EncoderOutput, Layout, SlotName
from tests.payloads import GOLDEN_REF2VA, GOLDEN_T2VA, SMALL_REF2VA, TEXT_DIM, layouts, payload_of, slots_of

BF16_NAN, BF16_INF, BF16_LARGEST, BF16_MINUS_INF = 0x7FC1, 0x7F80, 0x7F7F, 0xFF80


@given(layouts(), st.integers(1, 9), st.integers(0, 99))
def test_what_is_gathered_is_what_was_given(layout: Layout, tokens: int, seed: int) -> None:  # case 35
    slots = slots_of(layout, tokens=tokens, seed=seed)
    payload = codec.gather(slots, layout)
    codec.check_values(payload)
    assert payload.layout == layout
    for name, array in slots.items():
        assert payload.view(name) == array.tobytes()
    elements = sum(slot.nbytes for slot in payload.manifest.slots)
    assert payload.manifest.nbytes <= elements + 64 * len(SLOT_DTYPES)


def test_arrays_with_strides_and_signed_bits_are_read_by_value() -> None:  # case 35
    slots = slots_of(SMALL_REF2VA)
    plain = codec.gather(slots, SMALL_REF2VA)
    other = {
        TEXT: np.asfortranarray(slots[TEXT].view(np.int16)),
        ROLES: np.repeat(slots[ROLES], 2)[::2][:, None],
        VISUAL: np.repeat(slots[VISUAL], 2, axis=1)[:, ::2],
        AUDIO: slots[AUDIO][::-1][::-1],
    }
    assert codec.gather(other, SMALL_REF2VA).data == plain.data


def test_nan_payload_bits_travel_unchanged() -> None:  # case 35
    slots = slots_of(GOLDEN_T2VA)
    slots[TEXT][0, 0] = BF16_NAN
    assert codec.gather(slots, GOLDEN_T2VA).view(TEXT)[:2] == BF16_NAN.to_bytes(2, "little")


def test_a_text_only_payload_is_gathered_without_media() -> None:
    slots = {name: array for name, array in slots_of(GOLDEN_T2VA).items() if name in (TEXT, ROLES)}
    payload = codec.gather(slots, None)
    codec.check_values(payload)
    assert payload.manifest.text_only
    assert payload.layout is None


@pytest.mark.parametrize(
    ("name", "array", "error"),
    [
        (TEXT, np.zeros((5, TEXT_DIM), np.float16), errors.WrongDtype),
        (TEXT, np.zeros((5, TEXT_DIM), ">u2"), errors.WrongDtype),
        (TEXT, np.zeros(5 * TEXT_DIM, np.uint16), errors.WrongShape),
        (TEXT, np.zeros((0, TEXT_DIM), np.uint16), errors.WrongShape),
        (ROLES, np.zeros(5, np.int32), errors.WrongDtype),
        (ROLES, np.zeros(4, np.int64), errors.RowsMismatch),
        (VISUAL, np.zeros((7, 96), np.float64), errors.WrongDtype),
        (VISUAL, np.zeros((7, 96), np.float32), errors.RowsMismatch),
        (VISUAL, np.zeros((7, 24, 2, 2), np.float32), errors.WrongShape),
        (AUDIO, np.zeros((319, 32), np.float32), errors.RowsMismatch),
        (AUDIO, np.zeros((0, 32), np.float32), errors.RowsMismatch),
        ("embed.other", np.zeros(1, np.float32), errors.SlotUnexpected),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    name: SlotName, array: NDArray[Any], error: type[errors.PayloadError]
) -> None:  # case 43
    with pytest.raises(error) as refused:
        codec.gather({**slots_of(SMALL_REF2VA), name: array}, SMALL_REF2VA)
    assert refused.value.slot == name


@pytest.mark.parametrize("name", [TEXT, ROLES, VISUAL, AUDIO])
def test_an_array_left_out_is_refused(name: SlotName) -> None:
    slots = slots_of(SMALL_REF2VA)
    del slots[name]
    with pytest.raises(errors.SlotMissing):
        codec.gather(slots, SMALL_REF2VA)


@pytest.mark.parametrize("role", [2, -1, 2**40, -(2**63)])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_another_role_is_refused(role: int, at: int) -> None:
    slots = slots_of(SMALL_REF2VA)
    slots[ROLES][at] = role
    with pytest.raises(errors.BadRoles, match=f"token {at} has role {role}"):
        codec.check_values(codec.gather(slots, SMALL_REF2VA))


@pytest.mark.parametrize("bits", [BF16_NAN, BF16_INF, BF16_MINUS_INF, 0xFFFF])
def test_a_text_value_that_is_not_finite_is_refused(bits: int) -> None:
    slots = slots_of(SMALL_REF2VA, tokens=300_000)
    slots[TEXT][299_999, 7] = bits
    with pytest.raises(errors.NotFinite, match="element 2399999") as refused:
        codec.check_values(codec.gather(slots, SMALL_REF2VA))
    assert refused.value.slot == TEXT


@pytest.mark.parametrize("name", [VISUAL, AUDIO])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_media_value_that_is_not_finite_is_refused(name: SlotName, value: float) -> None:
    slots = slots_of(SMALL_REF2VA)
    slots[name][-1, -1] = value
    with pytest.raises(errors.NotFinite) as refused:
        codec.check_values(codec.gather(slots, SMALL_REF2VA))
    assert refused.value.slot == name


def test_the_largest_and_smallest_finite_values_pass() -> None:
    slots = slots_of(SMALL_REF2VA)
    slots[TEXT][0, :4] = [BF16_LARGEST, BF16_LARGEST | 0x8000, 0x8000, 1]
    slots[VISUAL][0, :2] = [np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal]
    codec.check_values(codec.gather(slots, SMALL_REF2VA))


@pytest.mark.steady
def test_checking_needs_little_memory() -> None:
    payload = payload_of(GOLDEN_REF2VA, tokens=2_000_000)
    tracemalloc.start()
    codec.check_values(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert payload.manifest.nbytes > 48 * 2**20
    assert peak < 24 * 2**20


def test_the_checksum_is_xxh3_64() -> None:
    assert codec.checksum(memoryview(b"")) == "2d06800538d394c2"
    assert codec.checksum(memoryview(b"a")) == "e6c632b61e964e1f"


@pytest.mark.parametrize("work", ["checksum", "copy"])
def test_other_threads_have_their_turn_meanwhile(work: str) -> None:
    """The API process hashes in a thread beside its event loop: a call may not hold the interpreter."""
    data = memoryview(bytearray(256 * 2**20))
    target = memoryview(bytearray(data.nbytes if work == "copy" else 0))
    job = {"checksum": lambda: codec.checksum(data), "copy": lambda: codec.copy(target, data)}[work]
    assert any(longest_pause(job) < 0.5 for _ in range(5)), "on a busy machine one good try decides"


def longest_pause(job: Callable[[], object]) -> float:
    """The longest time this thread had no turn while `job` ran in another, as a share of the job's time."""
    thread = threading.Thread(target=job)
    begun = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    return longest / (last - begun)


def test_a_payload_may_be_a_view_of_something_larger() -> None:
    payload = payload_of(SMALL_REF2VA)
    memory = bytearray(64) + bytearray(payload.data) + bytearray(64)
    codec.check_values(EncoderOutput(manifest=payload.manifest, data=memoryview(memory)[64:]))
