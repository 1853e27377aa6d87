"""What a request's numbers become before the first step: the two noise schedules and the noise."""

import pytest
import torch
from diffusers.modular_pipelines import PipelineState

from diffusion_service.commands import Generate
from diffusion_service.sampling.prepare import blocks_of, prepare
from shared_runtime.conditioning.blocks import Pipeline, assemble
from shared_runtime.conditioning.packing import Conditions
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_scheduler
from shared_schema.encode import ShmLanding
from shared_schema.layout import Layout
from shared_schema.tasks import Task
from tests.payloads import payload_of

BLOCKS = blocks_of(Task.T2VA)
TEXT = Conditions(torch.zeros(1, 6, 32, dtype=torch.bfloat16), torch.ones(6, dtype=torch.int64))
POINTS = 5
SMALL = Layout(Task.T2VA, 32, 64, 107)


@pytest.fixture
def pipeline() -> Pipeline:
    path = tiny_checkpoint()
    named = {type(block).__name__: block for block in BLOCKS}
    schedulers = {
        "scheduler": load_scheduler(path, "scheduler"),
        "audio_scheduler": load_scheduler(path, "audio_scheduler"),
    }
    return assemble(path, named, schedulers, torch.device("cpu"))


def begun(pipeline: Pipeline, flow_shift: float, audio_flow_shift: float, seed: int = 1) -> PipelineState:
    landing = ShmLanding(path="/x", offset=0, length=1, generation=1, request_id="1" * 32, deadline=0.0)
    command = Generate(
        landing=landing,
        manifest=payload_of(SMALL).manifest,
        task=Task.T2VA,
        height=SMALL.height,
        width=SMALL.width,
        num_frames=SMALL.num_frames,
        num_inference_steps=POINTS,
        flow_shift=flow_shift,
        audio_flow_shift=audio_flow_shift,
        outputs=(),
    )
    return prepare(pipeline, BLOCKS, command, seed, TEXT, (), ())


def shifted(shift: float) -> torch.Tensor:
    even = torch.linspace(1, 0, POINTS)
    return shift * even / (1 + (shift - 1) * even)


@pytest.mark.parametrize(("flow_shift", "audio_flow_shift"), [(12.0, 3.0), (6.0, 2.0), (1.0, 5.0)])
def test_picture_and_sound_have_the_schedules_that_the_request_asks_for(
    pipeline: Pipeline, flow_shift: float, audio_flow_shift: float
) -> None:
    begun(pipeline, 9.0, 9.0)
    begun(pipeline, flow_shift, audio_flow_shift)
    torch.testing.assert_close(pipeline.scheduler.sigmas, shifted(flow_shift))
    torch.testing.assert_close(pipeline.audio_scheduler.sigmas, shifted(audio_flow_shift))


def test_sigma_points_are_one_more_than_forwards(pipeline: Pipeline) -> None:
    state = begun(pipeline, 12.0, 3.0)
    assert len(state.get("timesteps")) == len(state.get("row_timestep_plan")) == POINTS - 1


def test_the_seed_alone_decides_the_noise(pipeline: Pipeline) -> None:
    first, again, other = (begun(pipeline, 12.0, 3.0, seed) for seed in (1, 1, 2))
    for name in ("latents", "audio_latents"):
        assert torch.equal(first.get(name), again.get(name))
        assert not torch.equal(first.get(name), other.get(name))
