from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_runtime.transport.allocator import FirstFit

UNIT = 64
STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 1200), st.integers(0, 50)), max_size=60)


@given(STEPS)
def test_pieces_never_overlap_and_everything_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    room = FirstFit(4096, UNIT)
    live: dict[int, int] = {}
    for take, length, which in steps:
        if take:
            offset = room.take(length)
            if offset is None:
                assert all(free < room.rounded(length) for _, free in room.free_ranges)
                continue
            end = offset + room.rounded(length)
            assert offset % UNIT == 0
            assert end <= room.size
            assert all(end <= start or start + size <= offset for start, size in live.items())
            live[offset] = room.rounded(length)
        elif live:
            offset = sorted(live)[which % len(live)]
            room.give(offset)
            del live[offset]
        ranges = room.free_ranges
        assert all(a + b < c for (a, b), (c, _) in pairwise(ranges)), "neighbours are merged"
        assert room.in_use == sum(live.values())
    for offset in live:
        room.give(offset)
    assert room.free_ranges == ((0, 4096),)


def test_the_first_range_that_fits_is_taken() -> None:
    room = FirstFit(1024, UNIT)
    offsets = [room.take(256) for _ in range(4)]
    assert offsets == [0, 256, 512, 768]
    room.give(0)
    room.give(512)
    assert (room.take(64), room.take(256), room.take(256)) == (0, 512, None)


def test_a_piece_is_never_shorter_than_asked() -> None:
    room = FirstFit(1024, UNIT)
    assert (room.take(65), room.take(64), room.take(1), room.take(1)) == (0, 128, 192, 256)


def test_a_piece_is_given_back_once() -> None:
    room = FirstFit(1024, UNIT)
    offset = room.take(1)
    assert offset is not None
    room.give(offset)
    with pytest.raises(KeyError):
        room.give(offset)
