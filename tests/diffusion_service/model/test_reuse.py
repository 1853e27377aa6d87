"""Forwards that end after the first block: when, what they are made of, and that lossless ones never do."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines import BlockState
from torch import nn
from torch._dynamo.testing import CompileCounter

from diffusion_service.model.adaln import Modulation
from diffusion_service.model.attention import attend_with, use_attention
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Dit, Moment, Rows
from diffusion_service.model.offload import Blocks, ResidentBlocks, Run, StreamedBlocks
from diffusion_service.model.reuse import FirstBlockCache, Reuse
from diffusion_service.sampling.denoise import denoised_rows
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_transformer
from shared_schema.quality import StepCache
from tests.diffusion_service.parallel.dit_forward import inputs

ALWAYS = StepCache(threshold=math.inf, warm_up_forwards=2, most_in_a_row=1)
NEVER = StepCache(threshold=0.0, warm_up_forwards=1, most_in_a_row=1)
STEPS = 7


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Counted:
    """Blocks that note which of them ran."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.resident_bytes = self.offloaded_bytes = 0
        self.passes: list[int] = []

    def __iter__(self) -> Iterator[nn.Module]:
        self.passes.append(0)
        for block in self._blocks:
            self.passes[-1] += 1
            yield block


@dataclass(frozen=True)
class Made:
    """Velocities of every step, and how many blocks each ran."""

    velocities: list[tuple[torch.Tensor, torch.Tensor]]
    passes: list[int]
    skipped: int


def transformer() -> Any:
    model = load_transformer(tiny_checkpoint(), "transformer", "cpu")
    use_attention(model, attend_with("TORCH_SDPA"))
    return model


def run(profile: StepCache | None, blocks: Any = ResidentBlocks, compile_with: Any = None) -> Made:
    """All steps of one request whose latents drift a little from step to step."""
    model = transformer()
    given = inputs(5, model.config, torch.float32)
    counted = Counted(blocks(model.transformer_blocks))
    dit = Dit(model, Modulation(model, on_host=False), blocks=counted)
    if compile_with is not None:
        compile_blocks(model.transformer_blocks, backend=compile_with)
        dit.warm_up(60)
        counted.passes.clear()
    times = [Moment(torch.tensor([0.3, 0.7]) - number / 1000, given["timestep_indices"]) for number in range(STEPS)]
    reuse = None if profile is None else Reuse(profile, (given["video_indices"], given["audio_indices"]))
    denoising = dit.begin(given["encoder_hidden_states"], Rows.from_layout(given), times, reuse)
    video, audio = given["hidden_states"], given["audio_hidden_states"]
    velocities = []
    for number in range(STEPS):
        made = denoising.step(number, video, audio)
        video, audio = video - made[0] / 500, audio - made[1] / 500
        velocities.append(made)
    return Made(velocities, counted.passes, denoising.skipped)


def equal(one: Made, other: Made) -> list[bool]:
    pairs = zip(one.velocities, other.velocities, strict=True)
    return [all(map(torch.equal, mine, theirs)) for mine, theirs in pairs]


def test_a_threshold_of_zero_is_lossless_bit_for_bit() -> None:
    lossless, never = run(None), run(NEVER)
    assert all(equal(lossless, never))
    assert lossless.passes == never.passes == [2] * STEPS
    assert lossless.skipped == never.skipped == 0


def test_a_skipped_step_runs_the_first_block_alone_and_stays_near() -> None:
    lossless, made = run(None), run(ALWAYS)
    assert made.passes == [2, 2, 1, 2, 1, 2, 1]
    assert made.skipped == 3
    assert equal(lossless, made)[:3] == [True, True, False]
    for mine, theirs in zip(made.velocities, lossless.velocities, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert float((one - other).norm() / other.norm()) < 0.02


def test_what_the_other_blocks_added_is_added_again() -> None:
    cache = FirstBlockCache(ALWAYS, torch.ones(1, 4), tuple)
    draw = torch.Generator().manual_seed(0)
    before, first, last, later, after = torch.randn(5, 1, 4, 8, generator=draw).unbind(0)
    for _ in range(2):
        assert cache.reuse(before, first) is None
        cache.keep(last)
    made = cache.reuse(later, after)
    assert made is not None
    assert torch.equal(made, after + (last - first))
    assert cache.reuse(later, after) is None  # never two in a row
    assert (cache.skips.forwards, cache.skips.skipped) == (3, 1)


@pytest.mark.parametrize(
    ("row", "skips"),
    [pytest.param(0, True, id="condition"), pytest.param(1, False, id="picture"), pytest.param(9, False, id="sound")],
)
def test_picture_and_sound_decide_each_by_itself_and_conditions_do_not(row: int, skips: bool) -> None:
    streams = torch.zeros(2, 10)
    streams[0, 1:9] = streams[1, 9] = 1
    cache = FirstBlockCache(ALWAYS.model_copy(update={"threshold": 0.2}), streams, tuple)
    before, first = torch.zeros(1, 10, 4), torch.ones(1, 10, 4)
    for _ in range(2):
        assert cache.reuse(before, first) is None
        cache.keep(first)
    moved = first.clone()
    moved[0, row] = 3
    assert (cache.reuse(before, moved) is not None) is skips


def test_conditions_lead_their_stream_and_are_none_of_what_decides() -> None:
    rows = Rows.from_layout(inputs(5, transformer().config, torch.float32))
    inner = BlockState(num_condition_video_rows=2, num_condition_audio_rows=3)
    video, audio = denoised_rows(inner, rows)
    assert video.tolist() == list(range(17, 45))
    assert audio.tolist() == list(range(8, 15))


def test_ranks_decide_on_the_sums_of_all_of_them() -> None:
    told: list[Sequence[float]] = []

    def total(values: Sequence[float]) -> Sequence[float]:
        told.append(values)
        return [3e9, 0.0, 1.0, 1.0]  # another rank saw much of the picture change

    cache = FirstBlockCache(ALWAYS.model_copy(update={"threshold": 0.5}), torch.ones(2, 4), total)
    before, first = torch.zeros(1, 4, 2), torch.ones(1, 4, 2)
    for _ in range(3):
        assert cache.reuse(before, first) is None
        cache.keep(first)
    assert told == [[0.0, 0.0, 8.0, 8.0]]


def test_what_is_not_finite_is_never_skipped() -> None:
    cache = FirstBlockCache(ALWAYS, torch.ones(1, 4), tuple)
    first = torch.full((1, 4, 2), math.nan)
    for _ in range(3):
        assert cache.reuse(torch.zeros(1, 4, 2), first) is None
        cache.keep(first)


@pytest.mark.parametrize("kept", [0, 1])
def test_blocks_that_come_from_the_host_make_the_same_and_are_copied_no_more_than_they_run(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    copies: list[Run] = []
    copy_to = Run.copy_to
    monkeypatch.setattr(Run, "copy_to", lambda run, *rest: (copies.append(run), copy_to(run, *rest))[1])

    def streamed(blocks: Any) -> StreamedBlocks:
        return StreamedBlocks(blocks, torch.device("cpu"), None, resident=kept)

    made = run(ALWAYS, streamed)
    assert made.skipped == 3
    assert all(equal(made, run(ALWAYS)))
    whole_passes = STEPS - made.skipped
    assert len(copies) <= (2 - kept) * whole_passes + 2


def test_skipping_compiles_nothing_more() -> None:
    torch._dynamo.reset()
    compiled = CompileCounter()
    made = run(ALWAYS, compile_with=compiled)
    assert made.skipped == 3
    assert compiled.frame_count == 1
