"""What this version refuses although the file is right."""

import pytest

from shared_schema.deploy.load import load_deployment, preset_names
from shared_schema.deploy.served import check_served, unused_keys
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


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "tiny"])
def test_every_preset_with_more_is_refused(name: str) -> None:
    with pytest.raises(DeployError):
        check_served(load_deployment(name))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ('{"0":{"devices":"cpu,cpu","tensor_parallel_size":2}}', "stage 0 asks for 2 ranks"),
        ('{"1":{"devices":"cpu,cpu","ulysses_degree":2}}', "stage 1 asks for 2 ranks"),
        ('{"1":{"enable_cpu_offload":true}}', "offload of stage 1"),
        ('{"1":{"enable_layerwise_offload":true}}', "offload of stage 1"),
        ('{"1":{"enable_distributed_layerwise_offload":true}}', "offload of stage 1"),
        ('{"1":{"diffusion_offload_config":{"mode":"module","components":["dit"]}}}', "offload of stage 1"),
        ('{"1":{"quantization_config":{"transformer":{"method":"fp8"}}}}', "diffusion_quantization_config"),
        ('{"1":{"diffusion_attention_backend":"FLASH_ATTN"}}', "FLASH_ATTN is not served yet"),
        ('{"1":{"load_format":"dummy"}}', "load_format: dummy is not served yet"),
    ],
)
def test_what_comes_later_is_refused_by_name(overrides: str, message: str) -> None:
    with pytest.raises(DeployError, match=message):
        check_served(load_deployment("tiny", overrides))


def test_a_lora_is_refused() -> None:
    with pytest.raises(DeployError, match="--lora-path is not served yet"):
        check_served(load_deployment("tiny"), "turbo.safetensors")


def test_keys_that_change_nothing_are_listed() -> None:
    assert unused_keys(load_deployment("tiny")) == []
    assert unused_keys(load_deployment(BASE)) == ["trust_remote_code", "stages[0].gpu_memory_utilization"]
