"""The shipped deploy files, and the commands of the recipes on top of them."""

import json

import pytest
import yaml

from shared_schema.deploy.load import PRESETS, load_deployment, preset_names, resolved_text

BASE = "minimax_h3_disaggregated"
FIVE_GPUS = (
    '{"0":{"devices":"0","tensor_parallel_size":1},'
    '"1":{"devices":"1,2,3,4","tensor_parallel_size":1,"ulysses_degree":4,"vae_patch_parallel_size":4}}'
)
TP2_TO_TP4 = '{"1":{"tensor_parallel_size":4,"ulysses_degree":1}}'

GROUPS = {
    # name: encoder devices, TP | diffusion devices, TP, Ulysses, VAE patch | steps, shifts | connector, text-only
    "tiny": ("cpu", 1, "cpu", 1, 1, 1, 50, None, None, "SharedMemoryConnector", False),
    "demo": ("cpu", 1, "cpu", 1, 1, 1, 9, None, None, "SharedMemoryConnector", False),
    "tiny_parallel": ("cpu,cpu", 2, "cpu,cpu", 1, 2, 2, 50, None, None, "SharedMemoryConnector", False),
    BASE: ("0,1", 2, "2,3,4,5", 1, 4, 4, 50, None, None, "SharedMemoryConnector", False),
    f"{BASE}_nixl": ("0,1", 2, "2,3,4,5", 1, 4, 4, 50, None, None, "NixlConnector", False),
    f"{BASE}_turbo": ("0,1", 2, "2,3,4,5", 1, 4, 4, 5, 6.0, 3.0, "SharedMemoryConnector", False),
    f"{BASE}_turbo_nixl": ("0,1", 2, "2,3,4,5", 1, 4, 4, 5, 6.0, 3.0, "NixlConnector", False),
    f"{BASE}_text": ("0,1", 2, "2,3,4,5", 1, 4, 4, 50, None, None, "SharedMemoryConnector", True),
}


def resolved(name: str, overrides: str | None = None) -> dict[str, object]:
    tree: dict[str, object] = json.loads(resolved_text(load_deployment(name, overrides), as_json=True))
    return tree


def differences(left: object, right: object, path: str = "") -> set[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        missing = object()
        return {
            found
            for key in left | right
            for found in differences(left.get(key, missing), right.get(key, missing), f"{path}.{key}")
        }
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return {
            found
            for i, pair in enumerate(zip(left, right, strict=True))
            for found in differences(*pair, f"{path}[{i}]")
        }
    return set() if left == right else {path}


def test_the_presets_are_the_seven_of_the_contract_and_the_demo() -> None:
    assert preset_names() == sorted(GROUPS)


@pytest.mark.parametrize("name", GROUPS)
def test_every_preset_resolves_to_its_topology(name: str) -> None:
    deployment = load_deployment(name)
    encoder, diffusion = deployment.encoder, deployment.diffusion
    parallel, defaults = diffusion.parallel_config, diffusion.defaults
    assert GROUPS[name] == (
        ",".join(encoder.devices),
        encoder.tensor_parallel_size,
        ",".join(diffusion.devices),
        parallel.tensor_parallel_size,
        parallel.ulysses_degree,
        parallel.vae_patch_parallel_size,
        defaults.num_inference_steps,
        defaults.flow_shift,
        defaults.audio_flow_shift,
        deployment.connector,
        diffusion.text_only,
    )
    assert defaults.seed == 42


@pytest.mark.parametrize("base", [BASE, f"{BASE}_turbo"])
def test_a_nixl_preset_differs_from_its_base_in_connector_and_references_only(base: str) -> None:
    assert differences(resolved(base), resolved(f"{base}_nixl")) == {
        ".connectors.nixl_connector",
        ".stages[0].output_connectors.to_stage_1",
        ".stages[1].input_connectors.from_stage_0",
    }
    written = yaml.safe_load((PRESETS / f"{base}_nixl.yaml").read_text(encoding="utf-8"))
    assert set(written) == {"base_config", "connectors", "stages"}


def test_the_turbo_preset_differs_from_its_base_in_sampling_only() -> None:
    sampling = ".stages[1].default_sampling_params"
    assert differences(resolved(BASE), resolved(f"{BASE}_turbo")) == {
        f"{sampling}.num_inference_steps",
        f"{sampling}.extra_args.flow_shift",
        f"{sampling}.extra_args.audio_flow_shift",
    }


def test_the_demo_preset_differs_from_the_tiny_one_in_its_sigma_points_only() -> None:
    changed = ".stages[1].default_sampling_params.num_inference_steps"
    assert differences(resolved("tiny"), resolved("demo")) == {changed}


def test_only_presets_of_small_checkpoints_have_a_small_slab() -> None:
    for name in GROUPS:
        expected = 64 * 2**20 if name.startswith(("tiny", "demo")) else None
        assert load_deployment(name).service.slab_bytes == expected


@pytest.mark.parametrize("name", [name for name in GROUPS if name.startswith(BASE) and not name.endswith("_text")])
def test_the_six_gpu_command_changes_the_two_degrees_and_nothing_else(name: str) -> None:
    assert differences(resolved(name), resolved(name, TP2_TO_TP4)) == {
        ".stages[1].parallel_config.tensor_parallel_size",
        ".stages[1].parallel_config.ulysses_degree",
    }
    deployment = load_deployment(name, TP2_TO_TP4)
    assert deployment.encoder.tensor_parallel_size == 2
    assert deployment.diffusion.parallel_config.tensor_parallel_size == 4
    assert deployment.diffusion.parallel_config.ulysses_degree == 1
    assert deployment.diffusion.parallel_config.vae_patch_parallel_size == 4


def test_the_five_gpu_command_puts_one_rank_on_the_encoder_and_four_on_the_transformer() -> None:
    for name in (BASE, f"{BASE}_text"):
        deployment = load_deployment(name, FIVE_GPUS)
        assert deployment.encoder.devices == ("0",)
        assert deployment.encoder.world_size == 1
        assert deployment.diffusion.devices == ("1", "2", "3", "4")
        assert deployment.diffusion.world_size == 4
        assert deployment.diffusion.parallel_config.ulysses_degree == 4


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ('{"1":{"enable_cpu_offload":true}}', {".enable_cpu_offload"}),
        (
            '{"1":{"enable_distributed_layerwise_offload":true,"dlo_use_allgather":false,"dlo_resident_layers":20}}',
            {".enable_distributed_layerwise_offload", ".dlo_use_allgather", ".dlo_resident_layers"},
        ),
        (
            '{"1":{"diffusion_quantization_config":"{\\"transformer\\":{\\"method\\":\\"fp8\\"}}"}}',
            {".diffusion_quantization_config"},
        ),
    ],
)
def test_the_memory_commands_of_the_recipe_change_what_they_name(overrides: str, changed: set[str]) -> None:
    assert differences(resolved(BASE), resolved(BASE, overrides)) == {f".stages[1]{key}" for key in changed}
