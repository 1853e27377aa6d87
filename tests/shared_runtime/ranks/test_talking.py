"""Deliveries, agreement and a leader at work, between real ranks."""

import pytest
import torch

from shared_runtime.ranks.mesh import Mesh
from shared_runtime.ranks.worker import as_h3_error
from tests.ranks import Ranks

JOBS = "tests.shared_runtime.ranks.talking"
SIZES = [1, 2, 4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.int64])
def test_parcels_arrive_whole_at_those_who_need_them(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    assert ranks.run(Mesh(tp=size), f"{JOBS}:ring", dtype)


@pytest.mark.parametrize("size", SIZES)
def test_a_delivery_of_nothing_hangs_nobody(ranks: Ranks, size: int) -> None:
    # case 57
    assert ranks.run(Mesh(tp=size), f"{JOBS}:nothing")


def test_an_error_of_one_rank_is_raised_on_all_of_them(ranks: Ranks) -> None:
    assert ranks.run(Mesh(tp=4), f"{JOBS}:agree", ()) == ["nothing"] * 4
    assert ranks.run(Mesh(tp=4), f"{JOBS}:agree", (3,)) == ["rank 3"] * 4
    assert ranks.run(Mesh(tp=4), f"{JOBS}:agree", (2, 1)) == ["rank 1"] * 4
    assert ranks.run(Mesh(), f"{JOBS}:agree", (0,)) == ["rank 0"]


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_the_same_to_the_bit_on_every_rank(ranks: Ranks, size: int) -> None:
    told = ranks.run(Mesh(tp=size), f"{JOBS}:total")
    assert len(told) == size
    (sums,) = set(told)
    first, second = map(float.fromhex, sums)
    assert first == pytest.approx(sum(10.0 ** (16 - 5 * rank) / 3 for rank in range(size)))
    assert second == -size


def test_ranks_that_wait_for_a_leader_at_work_beat_with_it(ranks: Ranks) -> None:
    # case 41: a wait that is known to end is no hang
    told = ranks.run(Mesh(tp=4), f"{JOBS}:busy", 1.0, False)
    assert [result for result, _ in told] == ["done"] * 4
    assert min(beats for _, beats in told) >= 2


def test_a_leader_that_fails_at_work_fails_all_ranks(ranks: Ranks) -> None:
    told = ranks.run(Mesh(tp=2), f"{JOBS}:busy", 0.0, True)
    assert [result for result, _ in told] == ["no good"] * 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 520.00 MiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        # As FlashAttention-3 says it.
        (
            RuntimeError('torch_call_dispatcher( "aten::new_empty", "", stack.data(), 0) API call failed at ops.h'),
            "out_of_memory",
        ),
        (RuntimeError('torch_call_dispatcher( "aten::copy_", "", stack.data(), 0) API call failed'), "internal_error"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "internal_error"),
    ],
)
def test_what_a_command_raises_has_a_type(error: Exception, code: str) -> None:
    assert as_h3_error(error).code == code
