"""What this version refuses although the file is right."""

from pathlib import Path

import pytest

from shared_schema.deploy.load import load_deployment, preset_names
from shared_schema.deploy.model import NixlConnector, NixlExtra
from shared_schema.deploy.served import NIXL_USED, check_lora, check_served, costs, unused_keys
from shared_schema.errors import DeployError

BASE = "minimax_h3_disaggregated"
ONE_GPU_EACH = (
    '{"0":{"devices":"0","tensor_parallel_size":1},'
    '"1":{"devices":"1","tensor_parallel_size":1,"ulysses_degree":1,"vae_patch_parallel_size":1}}'
)


def test_one_rank_each_is_served() -> None:
    check_served(load_deployment("tiny"))
    check_served(load_deployment(BASE, ONE_GPU_EACH))
    check_served(load_deployment(f"{BASE}_turbo", ONE_GPU_EACH))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_served(name: str) -> None:
    check_served(load_deployment(name))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ('{"1":{"diffusion_attention_backend":"FLASH_ATTN"}}', "FLASH_ATTN needs a GPU"),
        ('{"1":{"attention_backend":"CUDNN_ATTN"}}', "CUDNN_ATTN needs a GPU"),
    ],
)
def test_what_comes_later_is_refused_by_name(overrides: str, message: str) -> None:
    with pytest.raises(DeployError, match=message):
        check_served(load_deployment("tiny", overrides))


def test_an_adapter_does_not_go_with_made_up_weights() -> None:
    check_lora(load_deployment("tiny"), "turbo.safetensors")
    with pytest.raises(DeployError, match="--lora-path does not go with load_format: dummy"):
        check_lora(load_deployment("tiny", '{"1": {"load_format": "dummy"}}'), "turbo.safetensors")


def test_requests_choose_adapters_where_nobody_chose_one_for_all(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_config: tiny\nservice: {lora_roots: [/adapters]}\n")
    check_lora(load_deployment(str(file)), None)
    with pytest.raises(DeployError, match="lora_roots does not go with --lora-path"):
        check_lora(load_deployment(str(file)), "turbo.safetensors")
    with pytest.raises(DeployError, match="lora_roots does not go with load_format: dummy"):
        check_lora(load_deployment(str(file), '{"1": {"load_format": "dummy"}}'), None)


def test_the_scale_of_no_adapter_is_refused() -> None:
    scaled = load_deployment("tiny", '{"1":{"lora_scale":0.5}}')
    check_served(scaled)
    check_lora(scaled, "turbo.safetensors")
    with pytest.raises(DeployError, match=r"stages\[1\].lora_scale has no effect without lora_path"):
        check_lora(scaled, None)


def test_what_tf32_costs_is_said_by_the_stage_that_encodes() -> None:
    assert costs(load_deployment(BASE)) == costs(load_deployment(BASE, '{"0":{"vae_encode_precision":"fp32"}}')) == []
    (cost,) = costs(load_deployment(BASE, '{"0":{"vae_encode_precision":"tf32"}}'))
    assert cost.startswith("stages[0].vae_encode_precision: tf32 rounds every product: latents")
    (cost,) = costs(load_deployment(f"{BASE}_text", '{"1":{"vae_encode_precision":"tf32"}}'))
    assert cost.startswith("stages[1].")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "{distributed_executor_backend: ray, stages: [{stage_id: 0, share_devices: true}], base_config: tiny}",
            "share_devices does not go with distributed_executor_backend: ray",
        ),
        (
            "{connectors: {n: {name: NixlConnector, extra: {backends: [UCX, LIBFABRIC]}}}, base_config: tiny, "
            "stages: [{stage_id: 0, output_connectors: {to_stage_1: n}}, {stage_id: 1, input_connectors: "
            "{from_stage_0: n}}]}",
            r"extra.backends: \[UCX, LIBFABRIC\] is not served: use \[UCX\]",
        ),
    ],
)
def test_other_nixl_backends_and_devices_shared_under_ray_are_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(line if "base_config" in line else f"base_config: tiny\n{line}\n", encoding="utf-8")
    with pytest.raises(DeployError, match=message):
        check_served(load_deployment(str(file)))


def test_keys_that_change_nothing_are_listed() -> None:
    assert unused_keys(load_deployment("tiny")) == []
    assert unused_keys(load_deployment(BASE)) == ["trust_remote_code", "stages[0].gpu_memory_utilization"]
    nixl = [f"connectors.nixl_connector.extra.{key}" for key in ("host", "zmq_port")]
    assert unused_keys(load_deployment(f"{BASE}_nixl"))[1:3] == nixl


def test_every_option_of_nixl_is_used_or_listed() -> None:
    extra = {name: field.default for name, field in NixlExtra.model_fields.items()}
    deployment = load_deployment(f"{BASE}_nixl")
    given = NixlConnector(name="NixlConnector", extra=NixlExtra.model_validate(extra))
    listed = unused_keys(deployment.model_copy(update={"connectors": {"n": given}}))
    assert {f"connectors.n.extra.{name}" for name in set(extra) - NIXL_USED} <= set(listed)
    assert set(extra) > NIXL_USED
