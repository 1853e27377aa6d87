"""The vision tower in batches makes what transformers makes picture by picture."""

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from encoder_service.vision import batch_vision, runs_of
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_text_encoder

GRIDS = [[1, 4, 6], [1, 4, 6], [1, 6, 4], [5, 4, 4], [3, 4, 4], [1, 8, 2]]
"""Frames, rows and columns of patches: pictures, and clips of which every frame is one."""


def features(visual: Any, grids: list[list[int]]) -> torch.Tensor:
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    config = visual.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.randn(count, width, generator=torch.Generator().manual_seed(4))
    made = visual(pixels, grid_thw=torch.tensor(grids))
    return torch.cat([made.pooler_output.float(), *(each.float() for each in made.deepstack_features)], dim=-1)


@torch.no_grad()
def test_pictures_of_one_size_are_one_call_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    visual = load_text_encoder(tiny_checkpoint(), "cpu").float()
    wanted, other = (features(visual.model.visual, grids) for grids in (GRIDS, GRIDS[::-1]))
    batch_vision(visual)
    calls: list[torch.Size] = []
    attend = functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        calls.append(query.shape)
        return attend(query, *more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    made = features(visual.model.visual, GRIDS)
    assert float((made - wanted).norm() / wanted.norm()) < 1e-5
    depth = len(visual.model.visual.blocks)
    # Three pictures of 24 patches, eight frames and a picture of 16.
    assert [shape[0] for shape in calls] == [3, 9] * depth
    # Another request is another set of borders.
    again = features(visual.model.visual, GRIDS[::-1])
    assert float((again - other).norm() / other.norm()) < 1e-5


def test_runs_are_of_what_follows_itself() -> None:
    assert runs_of([4, 4, 6, 4]) == ((2, 4), (1, 6), (1, 4))
    assert runs_of([]) == ()
