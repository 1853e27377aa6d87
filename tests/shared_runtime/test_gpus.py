"""Which GPUs CUDA will show, without asking CUDA."""

import pytest

from shared_runtime.gpus import Gpu, installed_gpus, visible_gpus

EIGHT = tuple(Gpu(f"GPU-{number}{number}5f1c", "H200") for number in range(8))


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0,1,2", (0, 1, 2)),
        ("3, 2", (3, 2)),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", (0,)),
        ("0,8,1", (0,)),
        ("0,0", (0,)),
        ("GPU-33,1", (3, 1)),
        ("GPU-,1", ()),
        ("GPU-99", ()),
        ("2,GPU-225f1c", (2,)),
        ("all", ()),
    ],
)
def test_a_mask_names_gpus_until_its_first_invalid_entry(mask: str | None, visible: tuple[int, ...]) -> None:
    assert visible_gpus(mask, EIGHT) == tuple(EIGHT[index] for index in visible)


def test_a_slice_is_known_by_its_own_uuid() -> None:
    assert visible_gpus("MIG-77,0", EIGHT) == (Gpu("MIG-77", "MIG slice"), EIGHT[0])


@pytest.mark.parametrize("mask", [None, "0,1"])
def test_no_mask_shows_gpus_that_are_not_there(mask: str | None) -> None:
    assert visible_gpus(mask, ()) == ()


def test_looking_needs_no_driver() -> None:
    assert all(gpu.uuid.startswith("GPU-") for gpu in installed_gpus())
