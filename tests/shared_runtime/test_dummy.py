"""Made-up weights: the real shapes and dtypes, the same on every rank, and sane enough to compute with."""

import shutil
from pathlib import Path

import pytest
import torch

from shared_runtime.checkpoint import resolve_checkpoint
from shared_runtime.dummy import DummyTensor
from shared_runtime.stored import Component
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_audio_vae, load_text_encoder, load_transformer, load_video_vae
from shared_schema.errors import DeployError
from tests.diffusion_service.parallel.dit_forward import inputs

NEEDS: frozenset[Component] = frozenset(
    {"text_encoder", "tokenizer", "processor", "vae_decoder", "audio_vae_decoder", "transformer", "scheduler"}
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint without a single file of weights."""
    folder = tmp_path_factory.mktemp("configs") / "configs"
    shutil.copytree(tiny_checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    assert not list(folder.rglob("*.safetensors"))
    return folder


def test_a_folder_of_configs_is_enough(configs: Path) -> None:
    found = resolve_checkpoint(str(configs), NEEDS, dummy=True)
    assert (found.path, found.revision) == (configs, "dummy")
    with pytest.raises(DeployError, match="missing"):
        resolve_checkpoint(str(configs), NEEDS)


def test_nothing_is_fetched_for_made_up_weights() -> None:
    with pytest.raises(DeployError, match="load_format: dummy takes a folder"):
        resolve_checkpoint("owner/name", NEEDS, dummy=True)


def test_shapes_are_those_of_the_stored_weights(configs: Path) -> None:
    real = tiny_checkpoint()
    for load in (load_video_vae, load_audio_vae):
        for half in ("encoder", "decoder"):
            made, stored = load(configs, half, "cpu", dummy=True), load(real, half, "cpu")
            assert {n: (t.shape, t.dtype) for n, t in made.state_dict().items()} == {
                n: (t.shape, t.dtype) for n, t in stored.state_dict().items()
            }
    made, stored = load_text_encoder(configs, "cpu", dummy=True), load_text_encoder(real, "cpu")
    assert {n: t.shape for n, t in made.state_dict().items()} == {n: t.shape for n, t in stored.state_dict().items()}
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}


def test_the_transformer_is_bf16_but_for_what_the_released_one_keeps_exact(configs: Path) -> None:
    made = load_transformer(configs, "transformer", "cpu", dummy=True)
    dtypes = {name: parameter.dtype for name, parameter in made.named_parameters()}
    assert dtypes["proj_in.weight"] == dtypes["time_embedder.linear_1.weight"] == torch.float32
    assert dtypes["audio_proj_out.bias"] == torch.float32
    assert {t for n, t in dtypes.items() if n.startswith(("transformer_blocks", "token_refiner"))} == {torch.bfloat16}


def test_what_they_compute_is_finite_and_not_flat(configs: Path) -> None:
    transformer = load_transformer(configs, "transformer", "cpu", dummy=True)
    given = inputs(6, transformer.config, torch.float32)
    with torch.no_grad():
        video, audio = transformer(**given, return_dict=False)
        pixels = load_video_vae(configs, "decoder", "cpu", dummy=True).decode(torch.randn(1, 24, 7, 4, 4)).sample
        sound = load_audio_vae(configs, "decoder", "cpu", dummy=True).decode(torch.randn(2, 32, 40)).sample
    for made in (video, audio, pixels, sound):
        assert torch.isfinite(made).all()
        assert made.float().std() > 1e-3


def test_the_same_name_has_the_same_values_and_another_name_others() -> None:
    one = DummyTensor("a.weight", (64, 32), torch.bfloat16, CPU)
    assert torch.equal(one[...], DummyTensor("a.weight", (64, 32), torch.bfloat16, CPU)[...])
    assert torch.equal(one[8:16], one[...][8:16])
    assert not torch.equal(one[...], DummyTensor("b.weight", (64, 32), torch.bfloat16, CPU)[...])


@pytest.mark.parametrize(("name", "around"), [("norm1.weight", 1.0), ("scale1", 0.2), ("proj.bias", 0.0)])
def test_gains_lie_around_what_a_trained_model_has(name: str, around: float) -> None:
    values = DummyTensor(name, (4096,), torch.float32, CPU)[...]
    assert abs(values.mean().item() - around) < 0.01
    assert 0.01 < values.std().item() < 0.03
