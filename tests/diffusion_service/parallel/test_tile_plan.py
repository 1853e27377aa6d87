"""Who decodes what: pure arithmetic."""

from collections import Counter

import pytest

from diffusion_service.parallel.tile_plan import Deal, spans, tiles


def owners(deal: Deal) -> Counter[int]:
    return Counter(deal.owner(clip, tile) for clip in range(deal.clips) for tile in range(deal.tiles))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 15, 28])
def test_full_windows_load_every_rank_alike_and_hold_no_more_than_one_clip_has(ranks: int, count: int) -> None:
    window = Deal(ranks, 1, count).window
    held = owners(Deal(ranks, window, count))
    assert set(held.values()) == {window * count // ranks}
    assert max(held.values()) <= count


@pytest.mark.parametrize("clips", range(1, 23))
def test_a_last_window_that_is_not_full_is_dealt_over_all_ranks_too(clips: int) -> None:
    for ranks, count in ((4, 1), (4, 2), (4, 15), (8, 28), (8, 3)):
        deal = Deal(ranks, clips, count)
        for window in deal.windows():
            shares = Counter(deal.owner(clip, tile) for clip in window for tile in range(count))
            assert max(shares.values()) - min(shares[rank] for rank in range(ranks)) <= 1


def test_windows_are_the_clips_in_order() -> None:
    deal = Deal(ranks=4, clips=7, tiles=2)
    assert deal.window == 2
    assert [list(window) for window in deal.windows()] == [[0, 1], [2, 3], [4, 5], [6]]


def test_neighbours_stay_together() -> None:
    deal = Deal(ranks=4, clips=1, tiles=28)
    assert [deal.owner(0, tile) for tile in range(28)] == sorted([0, 1, 2, 3] * 7)


def test_tiles_own_every_pixel_once_and_know_their_neighbours() -> None:
    rows, columns = spans([0, 40, 80], [64, 64, 64], [24, 24]), spans([0, 48], [64, 64], [16])
    laid = tiles(rows, columns)
    seen = Counter((y, x) for tile in laid for y in range(144)[tile.y.owned] for x in range(112)[tile.x.owned])
    assert len(seen) == 144 * 112
    assert set(seen.values()) == {1}
    assert [(tile.above, tile.left) for tile in laid] == [(None, None), (None, 0), (0, None), (1, 2), (2, None), (3, 4)]
    assert (laid[3].y.before, laid[3].y.after, laid[3].x.before, laid[3].x.after) == (24, 24, 16, 0)
