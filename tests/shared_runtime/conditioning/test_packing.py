"""Conditions survive the payload bit for bit, whatever their mix."""

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents

from shared_runtime.conditioning.packing import Conditions, pack, unpack, unpatchify
from shared_schema.errors import RowsMismatch
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import Task

IMAGE = Block(BlockKind.IMAGE, latent_h=6, latent_w=4)
CLIP = Block(BlockKind.VIDEO, 7, 7, 4, 6)
MUTE = Block(BlockKind.SILENT_VIDEO, 0, 2, 4, 4)
VOICE = Block(BlockKind.AUDIO, 5)


def conditions(*blocks: Block) -> Conditions:
    random = torch.Generator().manual_seed(len(blocks))
    return Conditions(
        prompt_embeds=torch.randn(1, 9, 32, generator=random).to(torch.bfloat16),
        roles=torch.tensor([0, 1] * 4 + [1]),
        visual=tuple(
            torch.randn(1, 24, *block.visual_shape, generator=random) for block in blocks if block.visual_shape
        ),
        audio=tuple(torch.randn(2 * block.audio_t, 32, generator=random) for block in blocks if block.has_sound),
    )


@pytest.mark.parametrize(
    "blocks", [(), (IMAGE,), (IMAGE, CLIP, VOICE), (VOICE, CLIP, IMAGE, MUTE)], ids=["none", "one", "grouped", "mixed"]
)
def test_unpacking_gives_back_what_was_packed(blocks: tuple[Block, ...]) -> None:
    made = conditions(*blocks)
    layout = Layout(Task.REF2VA if blocks else Task.T2VA, 64, 64, 107, blocks)
    payload = pack(made, layout).on_host()
    assert payload.layout == layout
    got = unpack(payload)
    assert got.prompt_embeds.dtype is torch.bfloat16
    assert torch.equal(got.prompt_embeds, made.prompt_embeds)
    assert torch.equal(got.roles, made.roles)
    assert len(got.visual) == len(made.visual)
    assert len(got.audio) == len(made.audio)
    assert all(map(torch.equal, got.visual, made.visual))
    assert all(map(torch.equal, got.audio, made.audio))


def test_a_text_payload_has_words_alone() -> None:
    made = conditions()
    got = unpack(pack(made, None).on_host())
    assert torch.equal(got.prompt_embeds, made.prompt_embeds)
    assert (got.visual, got.audio) == ((), ())


def test_rows_go_by_channel_then_patch_row_then_patch_column() -> None:
    latents = torch.arange(24 * 2 * 4 * 6, dtype=torch.float32).reshape(1, 24, 2, 4, 6)
    rows = patchify_video_latents(latents, (1, 2, 2))
    first = [latents[0, 0, 0, y, x].item() for y in (0, 1) for x in (0, 1)]
    assert rows[0, :4].tolist() == first
    assert torch.equal(unpatchify(rows, Block(BlockKind.SILENT_VIDEO, 0, 2, 4, 6)), latents)


def test_conditions_that_do_not_fit_their_layout_are_refused() -> None:
    with pytest.raises(RowsMismatch):
        pack(conditions(IMAGE), Layout(Task.REF2VA, 64, 64, 107, (IMAGE, MUTE)))


def test_what_was_unpacked_outlives_the_landing() -> None:
    made = conditions(IMAGE)
    payload = pack(made, Layout(Task.REF2VA, 64, 64, 107, (IMAGE,))).on_host()
    got = unpack(payload)
    payload.data[:] = bytes(payload.data.nbytes)
    assert torch.equal(got.prompt_embeds, made.prompt_embeds)
    assert torch.equal(got.visual[0], made.visual[0])
