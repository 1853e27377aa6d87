from pathlib import Path

import pytest
import torch

from shared_runtime.checkpoint import resolve_checkpoint
from shared_runtime.demo.prompts import prompts
from shared_runtime.demo.scene import Motion, Pitch, Scene, Shape, Speed
from shared_runtime.demo.weights import CHECKPOINT
from shared_runtime.stored import Component
from shared_runtime.weights import (
    load_audio_vae,
    load_processor,
    load_scheduler,
    load_text_encoder,
    load_tokenizer,
    load_transformer,
    load_video_vae,
)
from shared_schema.tasks import aspect_ratio, canvas_for_ratio
from training import geometry
from training.folder import MAKERS, PARTITIONS, WEIGHTS, begun, megabytes, read_component, wait_for, write_component

ENCODER: frozenset[Component] = frozenset(
    {"text_encoder", "tokenizer", "processor", "vae_encoder", "audio_vae_encoder"}
)
DIFFUSION: frozenset[Component] = frozenset(
    {"transformer", "transformer_ref", "vae_decoder", "audio_vae_decoder", "scheduler", "audio_scheduler"}
)
SCENE = Scene(Shape.DISC, "orange", "black", Motion.LEFT, Speed.FAST, Pitch.LOW, 0.5, 0.5)


def test_both_services_find_all_that_they_need_and_it_is_small(untrained: Path) -> None:
    for needs in (ENCODER, DIFFUSION):
        found = resolve_checkpoint(str(untrained), needs)
        assert found.text_dim == geometry.TEXT_DIM
        assert found.limits.short_edge == found.limits.reference_short_edge == 64
    assert megabytes(untrained) <= 32


def test_the_strict_loaders_take_every_component(untrained: Path) -> None:
    assert load_text_encoder(untrained, "cpu").dtype == torch.bfloat16
    for half in ("encoder", "decoder"):
        load_video_vae(untrained, half, "cpu")  # type: ignore[arg-type]
        load_audio_vae(untrained, half, "cpu")  # type: ignore[arg-type]
    for partition in PARTITIONS:
        model = load_transformer(untrained, partition, "cpu")  # type: ignore[arg-type]
        assert model.proj_in.weight.dtype == torch.float32
        assert model.transformer_blocks[0].attn.to_q.weight.dtype == torch.bfloat16
    load_processor(untrained)
    assert load_scheduler(untrained, "scheduler").shift == 12
    assert load_scheduler(untrained, "audio_scheduler").shift == 3


def test_the_geometry_is_the_released_one(untrained: Path) -> None:
    video, audio = load_video_vae(untrained, "decoder", "cpu"), load_audio_vae(untrained, "decoder", "cpu")
    assert (video.spatial_compression_ratio, video.temporal_compression_ratio) == (16, 4)
    assert (video.config.clip_length, video.config.token_drop, video.config.latent_channels) == (17, 3, 24)
    assert (video.tile_sample_min_height, audio.hop_length) == (256, 800)


@pytest.mark.parametrize(("ratio", "size"), [("16:9", (64, 96)), ("9:16", (96, 64)), ("1:1", (64, 64))])
def test_the_canvas_rule_gives_the_sizes_that_were_trained_on(
    untrained: Path, ratio: str, size: tuple[int, int]
) -> None:
    limits = resolve_checkpoint(str(untrained), DIFFUSION).limits
    canvas = canvas_for_ratio(*aspect_ratio(ratio), limits)
    assert (canvas.height, canvas.width) == size


def test_every_word_of_a_prompt_is_one_token_and_other_text_is_bytes(untrained: Path) -> None:
    tokenizer = load_tokenizer(untrained)
    for text in (*prompts(SCENE)[::50], *prompts(SCENE, video=True)[::5]):
        tokens = [tokenizer.decode([each]) for each in tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert [token.strip() for token in tokens] == [
            part for word in text.split() for part in ((word[:-1], word[-1]) if word[-1] in ".,;:" else (word,))
        ]
    assert len(tokenizer("zebra", add_special_tokens=False)["input_ids"]) == 5
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == geometry.text_config().image_token_id


def test_the_text_encoder_tells_words_apart_and_what_stands_before_them(untrained: Path) -> None:
    tokenizer, encoder = load_tokenizer(untrained), load_text_encoder(untrained, "cpu")

    def last(text: str) -> torch.Tensor:
        tokens = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            return encoder.model(input_ids=tokens, output_hidden_states=True).hidden_states[50][0, -1].float()

    red, blue, other = last("A disc that is red"), last("A disc that is blue"), last("The wall in front of red")
    assert torch.cosine_similarity(red, blue, 0) < 0.8
    assert torch.cosine_similarity(red, other, 0) > 0.8
    assert not torch.equal(red, other)


def test_a_component_is_read_as_it_was_written(tmp_path: Path) -> None:
    vae = geometry.video_vae()
    vae.register_to_config(latents_mean=[0.5] * 24)
    write_component(tmp_path, "vae", vae)
    again = read_component(tmp_path, "vae")
    assert again.config.latents_mean == [0.5] * 24
    assert all(torch.equal(a, b) for a, b in zip(vae.parameters(), again.parameters(), strict=True))
    assert set(MAKERS) == {"vae", "audio_vae", *PARTITIONS}


@pytest.mark.parametrize("name", MAKERS)
def test_a_stage_begins_with_what_was_learned_before(name: str) -> None:
    torch.manual_seed(0)
    new, taught = begun(name, None), begun(name, CHECKPOINT / name)
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in taught.parameters())
    pairs = zip(new.state_dict().items(), taught.state_dict().values(), strict=True)
    same = {key for (key, one), other in pairs if torch.equal(one, other)}
    assert not same & {key for key, _ in new.named_parameters() if "logs_proj" not in key}


def test_a_stage_waits_for_the_component_that_another_one_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, slept = geometry.video_vae(), []

    def write_meanwhile(_seconds: float) -> None:
        slept.append((tmp_path / "vae" / WEIGHTS).exists())
        write_component(tmp_path, "vae", vae)

    monkeypatch.setattr("training.folder.time.sleep", write_meanwhile)
    wait_for(tmp_path / "vae")
    assert slept == [False]
    assert [file.name for file in (tmp_path / "vae").glob("*.safetensors*")] == [WEIGHTS]
