"""What `--task-type auto` comes to on GPUs: both transformers where they fit."""

import json

import pytest

from diffusion_service.settled import both_fit
from shared_runtime.gpus import Gpu
from shared_schema.deploy.load import load_deployment

GIB = 2**30
BASE = "minimax_h3_disaggregated"
ONE = {"ulysses_degree": 1, "vae_patch_parallel_size": 1}
FP8 = {"transformer": {"method": "fp8"}}


@pytest.mark.parametrize(
    ("stage", "gpus", "gib", "fit"),
    [
        ({"devices": "2", "parallel_config": ONE}, 1, 140, True),
        ({"devices": "2", "parallel_config": ONE}, 1, 80, False),
        ({"devices": "2", "parallel_config": ONE, "diffusion_quantization_config": FP8}, 1, 80, True),
        ({"devices": "2", "parallel_config": ONE}, 1, 0, False),
        ({"devices": "2", "parallel_config": ONE, "enable_layerwise_offload": True}, 1, 140, False),
        ({}, 4, 140, False),
        ({"parallel_config": {"tensor_parallel_size": 4, **ONE, "vae_patch_parallel_size": 4}}, 4, 80, True),
        ({"devices": "cpu", "parallel_config": ONE}, 0, 0, True),
    ],
)
def test_both_transformers_are_loaded_where_every_gpu_holds_its_part(
    stage: dict[str, object], gpus: int, gib: int, fit: bool
) -> None:
    deployment = load_deployment(BASE, json.dumps({"1": stage}))
    found = tuple(Gpu(f"GPU-{number}", "a GPU", gib * GIB) for number in range(gpus))
    assert both_fit(deployment.diffusion, found) is fit
