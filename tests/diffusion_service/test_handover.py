"""What the diffusion service accepts as the manifest of a job's payload, before it reserves any memory for it."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from diffusion_service.handover import Handover, PayloadRules, check_manifest
from diffusion_service.jobs.job import PlannedReference
from shared_schema.encoder_output import LAYOUT, ROLES, TEXT, TEXT_ONLY_SLOTS, Manifest, SlotSpec
from shared_schema.errors import (
    LayoutInvalid,
    PayloadError,
    ReceiverBusy,
    RowsMismatch,
    SlabFull,
    SlotMissing,
    SlotUnexpected,
    WrongBytes,
    WrongDtype,
    WrongShape,
)
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import Task
from tests.diffusion_service.jobs import made
from tests.payloads import TEXT_DIM

TOKENS = 5
FULL, TEXT_ALONE = PayloadRules(text_only=False, text_dim=TEXT_DIM), PayloadRules(text_only=True, text_dim=TEXT_DIM)
IMAGE = PlannedReference(kind="image", file="0", sha256="0" * 64, bytes=1, width=64, height=96)
PLAN = made.PLAN.model_copy(
    update={"task": Task.FL2VA, "keyframes": (0, -1), "references": (IMAGE, IMAGE)},
)
LAYOUT_OF_PLAN = Layout(Task.FL2VA, 64, 96, 107, (Block(BlockKind.IMAGE, 0, 0, 4, 6),) * 2, (0, -1))


def full(layout: Layout = LAYOUT_OF_PLAN) -> Manifest:
    rows = (layout.visual_rows, 96) if layout.visual_rows else (0,)
    return Manifest.plan(
        {TEXT: (TOKENS, TEXT_DIM), ROLES: (TOKENS,), "embed.embedding": rows, "embed.speech_feat": (0,)}, layout
    )


def text_alone() -> Manifest:
    return Manifest.plan({TEXT: (TOKENS, TEXT_DIM), ROLES: (TOKENS,)}, None)


def with_slot(name: str, **changes: object) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        slots = [slot.model_copy(update=changes) if slot.name == name else slot for slot in manifest.slots]
        return manifest.model_copy(update={"slots": tuple(slots)})

    return change


def without(name: str) -> Callable[[Manifest], Manifest]:
    return lambda manifest: manifest.model_copy(
        update={"slots": tuple(slot for slot in manifest.slots if slot.name != name)}
    )


def says(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda manifest: manifest.model_copy(update=changes)


def with_more(slot: SlotSpec) -> Callable[[Manifest], Manifest]:
    return lambda manifest: manifest.model_copy(update={"slots": (*manifest.slots, slot)})


def test_each_split_takes_its_own_manifest() -> None:
    check_manifest(full(), PLAN, FULL)
    check_manifest(text_alone(), PLAN, TEXT_ALONE)
    assert [slot.name for slot in text_alone().slots] == list(TEXT_ONLY_SLOTS)


def test_each_split_refuses_the_others_manifest() -> None:
    with pytest.raises(SlotMissing, match="text alone, in the full split"):
        check_manifest(text_alone(), PLAN, FULL)
    with pytest.raises(SlotUnexpected, match="media too, in the text-only split"):
        check_manifest(full(), PLAN, TEXT_ALONE)


@pytest.mark.parametrize(("manifest", "split"), [(full(), False), (text_alone(), True)])
def test_text_of_another_model_is_refused(manifest: Manifest, split: bool) -> None:
    with pytest.raises(WrongShape, match="has 8 columns, not 16"):
        check_manifest(manifest, PLAN, PayloadRules(split, text_dim=16))


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (without(TEXT), SlotMissing),
        (without(ROLES), SlotMissing),
        (with_more(SlotSpec(name=LAYOUT, dtype="I64", shape=(15,), offset=192, nbytes=120)), SlotUnexpected),
        (with_more(SlotSpec(name="embed.embedding", dtype="F32", shape=(0,), offset=192, nbytes=0)), SlotUnexpected),
        (with_more(text_alone().slot(TEXT)), SlotUnexpected),
        (with_slot(TEXT, dtype="F32"), WrongDtype),
        (with_slot(ROLES, dtype="BF16"), WrongDtype),
        (with_slot(TEXT, shape=(TOKENS, TEXT_DIM + 1)), WrongShape),
        (with_slot(TEXT, shape=(TOKENS * TEXT_DIM,)), WrongShape),
        (with_slot(TEXT, shape=(-1, TEXT_DIM)), WrongShape),
        (with_slot(ROLES, shape=(TOKENS, 2)), WrongShape),
        (with_slot(TEXT, nbytes=79), WrongBytes),
        (with_slot(ROLES, offset=64), WrongBytes),
        (with_slot(TEXT, offset=-128), WrongBytes),
        (with_slot(ROLES, shape=(TOKENS - 1,), nbytes=8 * (TOKENS - 1)), RowsMismatch),
        (says(nbytes=1 << 40), WrongBytes),
        (says(layout=LAYOUT_OF_PLAN.pack()), LayoutInvalid),
        (says(text_dim=TEXT_DIM + 1), WrongShape),
        (says(text_only=False), SlotMissing),
    ],
)
def test_a_manifest_of_text_alone_is_checked_whole(
    broken: Callable[[Manifest], Manifest], error: type[PayloadError]
) -> None:
    with pytest.raises(error):
        check_manifest(broken(text_alone()), PLAN, TEXT_ALONE)


def test_no_tokens_are_no_payload() -> None:
    with pytest.raises(RowsMismatch, match="at least one token"):
        Manifest.plan({TEXT: (0, TEXT_DIM), ROLES: (0,)}, None)


@pytest.mark.parametrize(
    "other",
    [
        Layout(Task.T2VA, 64, 96, 107),
        Layout(Task.FL2VA, 96, 64, 107, (Block(BlockKind.IMAGE, 0, 0, 6, 4),) * 2, (0, -1)),
        Layout(Task.FL2VA, 64, 96, 124, LAYOUT_OF_PLAN.blocks, (0, -1)),
        Layout(Task.FL2VA, 64, 96, 107, LAYOUT_OF_PLAN.blocks[:1], (-1,)),
    ],
    ids=["task", "canvas", "length", "keyframes"],
)
def test_the_payload_of_another_request_is_refused(other: Layout) -> None:
    with pytest.raises(LayoutInvalid, match="another request"):
        check_manifest(full(other), PLAN, FULL)


class Starved:
    """A watcher that wants to know about hunger alone."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def starve(self, starving: bool) -> None:
        self.told.append(starving)


@pytest.mark.parametrize(("full", "told"), [(SlabFull("full"), [True, False]), (ReceiverBusy("soon"), [False, False])])
def test_nothing_is_given_up_for_a_receiver_that_is_ready_again_in_a_moment(
    full: SlabFull, told: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Receiver:
        kind = "shared_memory"

        def __init__(self) -> None:
            self.refusals: list[SlabFull] = [full]

        def reserve(self, *_: object) -> str:
            if self.refusals:
                raise self.refusals.pop()
            return "landing"

    handover: Any = Handover.__new__(Handover)
    handover._receiver, handover._lease_s = Receiver(), 60.0
    handover._cache = SimpleNamespace(make_room=lambda: False)
    handover._accounts = SimpleNamespace(waited=lambda *_: None)
    watcher = Starved()
    assert asyncio.run(handover._room(1, "1" * 32, watcher, None)) == "landing"
    assert watcher.told == told
