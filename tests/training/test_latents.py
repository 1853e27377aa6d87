import torch

from training.latents import OFF, disturbed


def test_clips_are_disturbed_by_a_part_of_the_spread_each_by_another_one() -> None:
    latents = 3 * torch.randn(64, 24, 6, 4, 6, generator=torch.Generator().manual_seed(0))
    off = (disturbed(latents, torch.Generator().manual_seed(1)) - latents).flatten(1).std(1) / latents.std()
    assert off.min() < 0.1 * OFF < 0.9 * OFF < off.max() < 1.05 * OFF
