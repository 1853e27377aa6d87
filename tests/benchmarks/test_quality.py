"""`benchmarks.quality` on the tiny model: nothing apart where nothing is skipped, and figures where something is."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.quality import bench, table

pytestmark = pytest.mark.slow


def test_it_tells_how_far_a_clip_with_skipped_forwards_is_off(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    asked = {"size": "64x64", "frames": 107, "layers": 2, "points": [5, 21], "threshold": 1.0, "tiny": True}
    file = tmp_path / "quality.json"
    figures = bench(argparse.Namespace(**asked, eager=True, device="cpu", json=file))
    few, many = figures["points"]["5"], figures["points"]["21"]
    assert (few["forwards"], few["skipped_forwards"]) == (4, 0)
    assert few["video_latents_error"] == few["audio_latents_error"] == 0
    assert few["frames_psnr_db"] is few["sound_psnr_db"] is None
    assert (many["forwards"], many["skipped_forwards"]) == (20, 8)
    assert 0.99 < many["audio_latents_cosine"] < 1 > many["video_latents_cosine"] > 0.99
    assert 20 < many["frames_psnr_db"] < 100
    assert json.loads(file.read_text())["points"] == figures["points"]
    assert "| 4 | 0 | " in table(figures["points"])
