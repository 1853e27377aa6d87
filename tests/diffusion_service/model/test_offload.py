"""Weights that wait on the host: clips with the same bits, and what is held where."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from diffusion_service.model.offload import ResidentBlocks, Run, StreamedBlocks, lock
from diffusion_service.model.turns import Parked, Turns
from shared_runtime.device_memory import PageLocker
from shared_runtime.weights import weight_bytes
from shared_schema.tasks import Task
from tests.diffusion_service.rank_jobs import Outcome, Shop, plan

PLANS = [(1, 1), (2, 1), (1, 2), (2, 2)]
MODES: dict[str, dict[str, object]] = {
    "module": {"enable_cpu_offload": True},
    "layerwise": {"enable_layerwise_offload": True},
    "gathered": {"enable_distributed_layerwise_offload": True},
    "rank-local": {"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False, "dlo_resident_layers": 1},
}


@pytest.fixture(scope="module")
def resident(shop: Shop) -> dict[tuple[int, int], Outcome]:
    return {degrees: shop.make({**plan(*degrees)}, steps=3) for degrees in PLANS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "degrees"),
    [
        ("module", (1, 1)),
        ("module", (2, 2)),
        ("layerwise", (1, 1)),
        ("layerwise", (2, 2)),
        ("gathered", (1, 2)),
        ("gathered", (2, 2)),
        ("rank-local", (1, 2)),
        ("rank-local", (2, 1)),
    ],
    ids=str,
)
def test_clips_are_those_of_resident_weights_bit_for_bit(
    shop: Shop, resident: dict[tuple[int, int], Outcome], mode: str, degrees: tuple[int, int]
) -> None:
    made, wanted = shop.make({**MODES[mode], **plan(*degrees)}, steps=3), resident[degrees]
    for task in Task:
        assert made.clips[task].digests == wanted.clips[task].digests, task
    assert made.facts.offloaded_bytes > 0 == wanted.facts.offloaded_bytes
    if mode == "module":
        assert made.facts.weight_bytes < wanted.facts.weight_bytes


class Stack(nn.Sequential):
    """Blocks that add what they hold, so that a wrong or late weight shows."""

    def __init__(self, count: int) -> None:
        super().__init__(*(nn.Linear(16, 24) for _ in range(count)))
        for number, block in enumerate(self):
            nn.init.constant_(block.weight, number)
            nn.init.constant_(block.bias, -number)
        self.requires_grad_(False)


def seen(blocks: Any) -> list[tuple[float, float]]:
    return [(float(block.weight.mean()), float(block.bias.mean())) for block in blocks]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("kept", [0, 1, 9])
def test_every_block_has_its_own_weights_at_its_turn_in_every_pass(count: int, kept: int) -> None:
    blocks = StreamedBlocks(Stack(count), torch.device("cpu"), None, resident=kept)
    for _ in range(4):
        assert seen(blocks) == [(number, -number) for number in range(count)]


def test_a_pass_that_breaks_off_leaves_the_next_one_whole() -> None:
    blocks = StreamedBlocks(Stack(5), torch.device("cpu"), None)
    for length in (1, 3, 2, 5, 4):
        for number, block in enumerate(blocks):
            assert float(block.weight.mean()) == number
            if number == length:
                break
    assert seen(blocks) == [(number, -number) for number in range(5)]


def test_two_blocks_are_on_the_device_and_all_on_the_host() -> None:
    whole = weight_bytes(Stack(7)[0])
    blocks = StreamedBlocks(Stack(7), torch.device("cpu"), None)
    assert 2 * whole <= blocks.resident_bytes < 3 * whole
    assert 7 * whole <= blocks.offloaded_bytes < 8 * whole
    some = StreamedBlocks(Stack(7), torch.device("cpu"), None, resident=3)
    assert some.resident_bytes == blocks.resident_bytes + 3 * whole
    assert some.offloaded_bytes * 7 == blocks.offloaded_bytes * 4
    assert ResidentBlocks(Stack(7)).resident_bytes == 7 * whole


def test_host_memory_is_locked_in_chunks_as_far_as_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    runs = [Run(block) for block in Stack(7)]
    asked: list[int] = []

    def register(_address: int, nbytes: int) -> str | None:
        asked.append(nbytes)
        return "no more" if len(asked) > 5 else None

    locker = PageLocker(register, lambda _address: None, chunk=1024)
    with caplog.at_level(logging.INFO):
        lock(runs, locker, "blocks")
    assert max(asked) <= 1024 < runs[0].nbytes
    assert "the rest is copied slower: no more" in caplog.text
    target = torch.empty(runs[0].nbytes, dtype=torch.uint8)
    runs[0].copy_to(target, locker)
    assert torch.equal(target, runs[0].host)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        lock(runs, PageLocker(lambda _address, _nbytes: None, lambda _address: None), "blocks")
        lock(runs, None, "blocks")
    assert "in page-locked host memory" in caplog.text
    assert "not page-locked" in caplog.text


def test_modules_take_turns() -> None:
    device, turns, stacks = torch.device("cpu"), Turns(), {"a": Stack(3), "b": Stack(5)}
    for name, stack in stacks.items():
        turns.park(name, Parked(list(stack), device, None, name))
    assert turns.resident_bytes < turns.offloaded_bytes
    where = {name: {block.weight.data_ptr() for block in stack} for name, stack in stacks.items()}

    def away(name: str) -> bool:
        return {block.weight.data_ptr() for block in stacks[name]} == where[name]

    for name, other in (("a", "b"), ("b", "a"), ("b", "a")):
        turns.take(name)
        assert away(other)
        assert not away(name)
        assert seen(stacks[name]) == [(number, -number) for number in range(len(stacks[name]))]
    turns.take("somebody who is always there")
    assert away("a")
    assert away("b")
