"""What is learned from is what serves: the same layouts, the same forward, the same times."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

from training import geometry
from training.flow import Clips, Moment, batch_of, draw_parts, moment, noised, shifted
from training.packing import ANCHORED, Batch, Layout, Packed, Target, reference_layout, text_layout

TARGET = Target(frames=7, height=4, width=6, sound=11)
TAGS = torch.tensor([1, 1, 0, 0, 1, 1, 1])


def layouts() -> list[Layout]:
    references = [SimpleNamespace(kind="image", has_audio=False), SimpleNamespace(kind="audio", has_audio=True)]
    with_references = reference_layout(TAGS, TARGET, references, [torch.empty(1, 24, 1, 4, 4)], [torch.empty(10, 32)])
    return [text_layout(TAGS, TARGET, ()), text_layout(TAGS, TARGET, ("first", "last")), with_references]


def batch(layout: Layout, clips: int) -> Batch:
    random = torch.Generator().manual_seed(3)
    sizes = ((len(TAGS), geometry.TEXT_DIM), (len(layout.video), 96), (len(layout.sound), 32))
    rows = [torch.randn((clips, *size), generator=random) for size in sizes]
    times = torch.rand((clips, 2), generator=random)
    fixed = torch.tensor([[ANCHORED, 1.0]]).repeat(clips, 1)
    return Batch(layout, *rows, torch.cat([times, fixed], dim=1))


@pytest.mark.parametrize("index", range(3))
def test_clips_that_are_packed_together_get_what_each_gets_alone_from_the_served_forward(index: int) -> None:
    torch.manual_seed(0)
    model, layout = geometry.transformer().eval(), layouts()[index]
    many = batch(layout, 3)
    alone = []
    with torch.no_grad():
        for clip in range(3):
            times, of_row = MiniMaxH3SetTimestepsStep.build_row_timesteps(
                layout.video, layout.sound, layout.shown, layout.heard, len(TAGS), *many.times[clip].tolist()
            )
            alone.append(
                model(
                    hidden_states=many.video[clip : clip + 1],
                    audio_hidden_states=many.sound[clip : clip + 1],
                    encoder_hidden_states=many.text[clip : clip + 1],
                    timestep=times,
                    timestep_indices=of_row,
                    token_tags=layout.tags,
                    position_ids=layout.position_ids,
                    video_indices=layout.video,
                    audio_indices=layout.sound,
                    text_indices=layout.text,
                    return_dict=False,
                )
            )
        video, sound = Packed(model)(many)
    for clip in range(3):
        torch.testing.assert_close(video[clip], alone[clip][0][0, layout.shown :], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(sound[clip], alone[clip][1][0, layout.heard :], atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_it_also_runs_in_bfloat16_beside_exact_parts() -> None:
    torch.manual_seed(0)
    model, many = Packed(geometry.transformer()), batch(layouts()[1], 2)
    exact = model(many)
    with torch.autocast("cpu", torch.bfloat16):
        video, sound = model(many)
    (video.float().square().mean() + sound.float().square().mean()).backward()
    assert all(weight.grad is not None for weight in model.transformer.parameters())
    for half, full in ((video, exact[0]), (sound, exact[1])):
        assert (half - full).abs().mean() < 0.05 * full.abs().mean()


def clips(layout: Layout) -> Clips:
    shown, heard = torch.randn(2, layout.shown, 96), torch.randn(2, layout.heard, 32)
    made = torch.randn(2, len(layout.video) - layout.shown, 96), torch.randn(2, len(layout.sound) - layout.heard, 32)
    return Clips(layout, torch.randn(2, len(TAGS), geometry.TEXT_DIM), *made, shown, heard)


@pytest.mark.parametrize("shift", [12.0, 3.0])
def test_sigmas_are_the_schedulers(shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(9)
    torch.testing.assert_close(shifted(torch.linspace(1, 0, 9), shift), scheduler.sigmas)


def test_the_velocity_that_is_learned_leads_the_scheduler_to_the_data() -> None:
    scheduler = MiniMaxH3Scheduler(shift=12.0)
    scheduler.set_timesteps(5)
    data, noise = torch.randn(4, 96), torch.randn(4, 96)
    sample = noise
    for timestep in scheduler.timesteps:
        sample = scheduler.step(data - noise, timestep, sample, return_dict=False)[0]
    torch.testing.assert_close(sample, data, atol=1e-5, rtol=1e-5)


def test_a_batch_is_noised_as_served_and_conditions_are_hardly_or_not() -> None:
    layout = layouts()[2]
    clean, parts = clips(layout), torch.tensor([1.0, 0.25])
    at = moment(parts)
    made = noised(clean, at, torch.zeros_like(clean.video), torch.zeros_like(clean.sound))
    assert made.times[0].tolist() == pytest.approx([0, 0, ANCHORED, 1])
    assert made.times[1].tolist() == pytest.approx([1 - float(at.video[1]), 1 - float(at.sound[1]), ANCHORED, 1])
    torch.testing.assert_close(made.video[1, layout.shown :], (1 - at.video[1]) * clean.video[1])
    assert (made.video[:, : layout.shown] - clean.shown).abs().max() < 0.02
    assert torch.equal(made.sound[:, : layout.heard], clean.heard)


def test_a_picture_is_never_noisier_than_the_clip() -> None:
    clean = clips(layouts()[1])
    late = Moment(torch.full((2, 1, 1), 1e-4), torch.full((2, 1, 1), 1e-4))
    assert batch_of(clean, late, clean.video, clean.sound).times[:, 2].tolist() == pytest.approx([0.9999] * 2)


def test_parts_are_of_the_schedule_and_many_are_where_sampling_stops() -> None:
    parts = draw_parts(4000, torch.Generator().manual_seed(0))
    assert 0 < parts.min() <= parts.max() <= 1
    assert 0.4 < float(((parts * 8) % 1 == 0).float().mean()) < 0.6
