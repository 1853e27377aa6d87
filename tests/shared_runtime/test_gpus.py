"""How many GPUs CUDA will show, without asking CUDA."""

import pytest

from shared_runtime.gpus import count_gpus, visible_gpus


@pytest.mark.parametrize(
    ("mask", "installed", "visible"),
    [
        (None, 8, 8),
        (None, 0, 0),
        ("0,1,2", 8, 3),
        ("3, 2", 8, 2),
        ("", 8, 0),
        ("-1", 8, 0),
        ("0,-1,2", 8, 1),
        ("0,8,1", 8, 1),
        ("0,0", 8, 1),
        ("GPU-5f1c,MIG-77", 8, 2),
        ("0,1", 0, 0),
        ("all", 8, 0),
    ],
)
def test_a_mask_counts_until_its_first_invalid_entry(mask: str | None, installed: int, visible: int) -> None:
    assert visible_gpus(mask, installed) == visible


def test_counting_needs_no_driver() -> None:
    assert count_gpus() >= 0
