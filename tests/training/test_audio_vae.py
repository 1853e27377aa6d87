import numpy as np
import torch

from shared_runtime.demo.world import clicks
from shared_schema.tasks import AUDIO_LATENTS_PER_SECOND, SAMPLE_RATE
from training.audio_vae import STRUCK, struck

HOP = SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND


def test_clicks_are_added_at_latents_beginnings_and_the_rest_is_left() -> None:
    waves = torch.randn(20, 50 * HOP) * 0.1
    added = (struck(waves, torch.Generator().manual_seed(0)) - waves).unflatten(1, (50, HOP))
    click = torch.from_numpy(clicks(np.zeros(1), np.arange(HOP) / SAMPLE_RATE)).float()
    loud = (added @ click) / (click @ click)
    assert torch.allclose(added, loud[..., None] * click, atol=1e-5)
    heard = loud > 1e-3
    assert abs(float(heard.float().mean()) - STRUCK) < 0.05
    assert 0.5 < float(loud[heard].mean()) < 0.8
    assert float(loud.max()) <= 1.0
