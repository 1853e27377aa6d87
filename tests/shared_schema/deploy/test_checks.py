"""Every rule that spans keys, each with the one line it gives."""

import json
from pathlib import Path

import pytest

from shared_schema.deploy.checks import check_deployment
from shared_schema.deploy.load import OwnDevices, load_deployment
from shared_schema.errors import DeployError

BASE = "minimax_h3_disaggregated"
COMPONENTS = "minimax_h3_encoder_components"
OFFLOAD = {"mode": "layer", "components": ["dit"]}


def refusal(name: str, **stages: dict[str, object]) -> str:
    overrides = json.dumps({key.removeprefix("stage"): value for key, value in stages.items()})
    with pytest.raises(DeployError) as caught:
        load_deployment(name, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("--stage-overrides: ")


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ({"tensor_parallel_size": 1}, "stages[0].devices: must list 1 (tensor_parallel_size), not 2"),
        ({"devices": "0"}, "stages[0].devices: must list 2 (tensor_parallel_size), not 1"),
        (
            {"tensor_parallel_size": 3, "devices": "0,1,6"},
            "stages[0].tensor_parallel_size: must divide the text encoder's 64 heads and 8 key-value heads, not 3",
        ),
        (
            {"tensor_parallel_size": 16, "devices": ",".join(map(str, range(10, 26)))},
            "stages[0].tensor_parallel_size: must divide the text encoder's 64 heads and 8 key-value heads, not 16",
        ),
        (
            {"hf_overrides": {COMPONENTS: {"audio_vae": None}}},
            f"stages[0].hf_overrides.{COMPONENTS}: the full split names exactly text_encoder, video_vae, audio_vae, "
            "not text_encoder, video_vae",
        ),
        (
            {"hf_overrides": None},
            "stages[0].hf_overrides: should be an object, not null",
        ),
        (
            {"hf_overrides": {COMPONENTS: None}},
            f"stages[0].hf_overrides.{COMPONENTS}: the full split names exactly text_encoder, video_vae, audio_vae, "
            "not nothing",
        ),
        (
            {"hf_overrides": {COMPONENTS: {"text_encoder": {"parallel_mode": "leader"}}}},
            f"stages[0].hf_overrides.{COMPONENTS}.text_encoder.parallel_mode: should be 'tp', not \"leader\"",
        ),
        (
            {"hf_overrides": {COMPONENTS: {"audio_vae": {"parallel_mode": "patch"}}}},
            f"stages[0].hf_overrides.{COMPONENTS}.audio_vae.parallel_mode: should be 'leader', not \"patch\"",
        ),
        (
            {"hf_overrides": {COMPONENTS: {"video_vae": {"parallel_mode": "tp"}}}},
            f"stages[0].hf_overrides.{COMPONENTS}.video_vae.parallel_mode: should be 'patch' or 'leader', not \"tp\"",
        ),
        (
            {"hf_overrides": {COMPONENTS: {"video_vae": {"tile": 2}}}},
            f"stages[0].hf_overrides.{COMPONENTS}.video_vae.tile: unknown key",
        ),
        (
            {"output_connectors": {"to_stage_1": "other"}},
            "stages[0].output_connectors.to_stage_1: names 'other', and the connectors are: shared_memory_connector",
        ),
        ({"devices": "0,3"}, "stages[1].devices: both stages use GPU 3"),
    ],
)
def test_the_encoder_stage(encoder: dict[str, object], message: str) -> None:
    assert message in refusal(BASE, stage0=encoder)


@pytest.mark.parametrize(
    ("diffusion", "message"),
    [
        (
            {"ulysses_degree": 2},
            "stages[1].devices: must list 2 (tensor_parallel_size 1 x ulysses_degree 2), not 4",
        ),
        (
            {"ulysses_degree": 3, "devices": "2,3,4"},
            "stages[1].parallel_config: tensor_parallel_size x ulysses_degree must divide the transformer's 56 heads, "
            "not 1 x 3",
        ),
        (
            {"vae_patch_parallel_size": 2},
            "stages[1].parallel_config.vae_patch_parallel_size: must be 1 or the whole group (4), not 2",
        ),
        (
            {"enable_cpu_offload": True, "enable_layerwise_offload": True},
            "stages[1].enable_layerwise_offload: stands beside enable_cpu_offload: choose one kind of offload",
        ),
        (
            {"enable_distributed_layerwise_offload": True, "dlo_resident_layers": 20},
            "stages[1].dlo_resident_layers: needs dlo_use_allgather: false",
        ),
        (
            {"dlo_resident_layers": 20, "dlo_use_allgather": False},
            "stages[1].dlo_resident_layers: has no effect without enable_distributed_layerwise_offload: true",
        ),
        (
            {"dlo_use_allgather": False},
            "stages[1].dlo_use_allgather: has no effect without enable_distributed_layerwise_offload: true",
        ),
        (
            {"diffusion_offload_config": OFFLOAD, "enable_cpu_offload": True},
            "stages[1].diffusion_offload_config: stands beside enable_cpu_offload: use one of the two forms",
        ),
        (
            {"diffusion_offload_config": OFFLOAD, "dlo_use_allgather": False},
            "stages[1].diffusion_offload_config: stands beside dlo_use_allgather: use one of the two forms",
        ),
        (
            {"diffusion_offload_config": {**OFFLOAD, "components": ["text_encoder"]}},
            "stages[1].diffusion_offload_config.components[0]: should be 'dit', not \"text_encoder\"",
        ),
        (
            {"diffusion_offload_config": {"mode": "module", "components": ["dit"], "layer_options": {"dit": {}}}},
            "stages[1].diffusion_offload_config.layer_options: needs mode: layer",
        ),
        (
            {
                "diffusion_offload_config": {
                    **OFFLOAD,
                    "layer_options": {"dit": {"weight_transfer": "allgather", "resident_layers": 2}},
                }
            },
            "stages[1].diffusion_offload_config.layer_options.dit.resident_layers: needs weight_transfer: rank-local",
        ),
        (
            {"input_connectors": {"from_stage_0": "other"}},
            "stages[1].input_connectors.from_stage_0: names 'other', and the connectors are: shared_memory_connector",
        ),
        (
            {"devices": "1,2,3,4"},
            "stages[1].devices: both stages use GPU 1: separate them, or set share_devices: true in both",
        ),
        (
            {"devices": "1,2,3,4", "share_devices": True},
            "stages[1].devices: both stages use GPU 1: separate them, or set share_devices: true in both",
        ),
        (
            {"vae_encode_precision": "split"},
            "stages[1].vae_encode_precision: belongs to stage 0, which has the VAE encoders in this split",
        ),
        ({"vae_decode_precision": "bf16"}, "stages[1].vae_decode_precision: should be 'fp16', 'tf32' or 'fp32'"),
        (
            {"model_loaded": {"vae_encoder": True}},
            f"stages[0].hf_overrides.{COMPONENTS}: the text-only split names exactly text_encoder, "
            "not text_encoder, video_vae, audio_vae",
        ),
    ],
)
def test_the_diffusion_stage(diffusion: dict[str, object], message: str) -> None:
    assert message in refusal(BASE, stage1=diffusion)


def test_the_ends_of_the_edge_name_the_same_connector(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    nixl = "connectors: {nixl: {name: NixlConnector}}\n"
    one_end = "stages: [{stage_id: 1, input_connectors: {from_stage_0: nixl}}]\n"
    file.write_text(f"base_config: {BASE}\n{nixl}{one_end}", encoding="utf-8")
    assert refusal(str(file)) == (
        f"{file}: stages[1].input_connectors.from_stage_0: "
        "must name the connector of the other end, 'shared_memory_connector', not 'nixl'"
    )


def test_an_edge_with_one_end_is_refused(tmp_path: Path) -> None:
    text = "connectors: {nixl: {name: NixlConnector}}\nstages:\n"
    text += "  - {stage_id: 0, devices: cpu, output_connectors: {to_stage_1: nixl}, hf_overrides: {}}\n"
    text += "  - {stage_id: 1, devices: cpu, model_loaded: {text_encoder: false}}\n"
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    assert refusal(str(file)).endswith(
        "input_connectors.from_stage_0: must name the connector of the other end, 'nixl', not None"
    )


def test_a_connector_that_no_edge_names_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_config: tiny\nconnectors: {spare: {name: NixlConnector}}\n", encoding="utf-8")
    assert load_deployment(str(file)).connector == "SharedMemoryConnector"


def test_two_tokens_are_one_too_many(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base_config: tiny\nservice: {internal_token: a, internal_token_file: b}\n", encoding="utf-8")
    assert "service.internal_token_file: stands beside internal_token" in refusal(str(file))


def test_the_text_only_split_has_the_vae_encoders_in_stage_1() -> None:
    name = f"{BASE}_text"
    assert load_deployment(name, '{"1":{"vae_encode_precision":"tf32"}}').diffusion.encode_precision == "tf32"
    assert "stages[0].vae_encode_precision: belongs to stage 1" in refusal(
        name, stage0={"vae_encode_precision": "tf32"}
    )
    assert load_deployment(name, f'{{"0":{{"hf_overrides":{{"{COMPONENTS}":null}}}}}}').encoder.components is None


@pytest.mark.parametrize(("stage", "key"), [("stage0", "vae_encode_precision"), ("stage1", "vae_decode_precision")])
def test_tf32_needs_a_gpu(stage: str, key: str) -> None:
    assert f".{key}: tf32 needs a GPU: use fp32 on the CPU" in refusal("tiny", **{stage: {key: "tf32"}})


def test_split_products_need_a_gpu_and_are_what_is_made_on_one() -> None:
    message = "stages[0].vae_encode_precision: split needs a GPU: use fp32 on the CPU"
    assert message in refusal("tiny", stage0={"vae_encode_precision": "split"})
    assert load_deployment("tiny").encoder.encode_precision == "fp32"
    assert load_deployment(BASE).encoder.encode_precision == "split"
    message = "stages[0].vae_encode_precision: should be 'fp32', 'split' or 'tf32'"
    assert message in refusal(BASE, stage0={"vae_encode_precision": "fp16"})


def test_devices_may_overlap_when_both_stages_say_so() -> None:
    both = {"devices": "0", "tensor_parallel_size": 1, "share_devices": True}
    overrides = json.dumps({"0": both, "1": {**both, "ulysses_degree": 1, "vae_patch_parallel_size": 1}})
    deployment = load_deployment(BASE, overrides)
    assert deployment.encoder.devices == deployment.diffusion.devices == ("0",)


def test_overlap_is_not_looked_for_when_each_service_numbers_its_own_gpus() -> None:
    deployment = load_deployment(BASE, devices=OwnDevices(1, "0,1,2,3"))
    check_deployment(deployment, one_host_numbering=False)
    with pytest.raises(Exception, match="both stages use GPU 0, 1"):
        check_deployment(deployment)


@pytest.mark.parametrize(("tensor", "ulysses"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (1, 7), (7, 8), (56, 1)])
def test_every_product_that_divides_the_heads_is_legal(tensor: int, ulysses: int) -> None:
    ranks = tensor * ulysses
    stage = {
        "devices": ",".join(str(2 + i) for i in range(ranks)),
        "tensor_parallel_size": tensor,
        "ulysses_degree": ulysses,
        "vae_patch_parallel_size": ranks,
    }
    assert load_deployment(BASE, json.dumps({"1": stage})).diffusion.world_size == ranks


def test_tp_and_patch_with_one_rank_are_legal() -> None:
    roles = load_deployment("tiny").encoder.components
    assert roles is not None
    assert roles.text_encoder is not None
    assert roles.video_vae is not None
    assert (roles.text_encoder.parallel_mode, roles.video_vae.parallel_mode) == ("tp", "patch")


@pytest.mark.parametrize(
    ("service", "why"),
    [
        ("database: a, database_file: b", "service.database_file: stands beside database"),
        ("database: a", "service.storage.url: is needed beside database"),
        ("storage: {url: /shared}", "service.storage.url: goes with database"),
        ("database: a, storage: {url: shared}", "is an absolute path, or a URL"),
        ("database: a, storage: {url: /shared, content: redirect}", "redirect needs a url of an object store"),
        ("database: a, storage: {url: 's3://b', options: {secret: x}}", "options: secret does not belong here"),
    ],
)
def test_a_shared_queue_needs_a_shared_store(tmp_path: Path, service: str, why: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"base_config: tiny\nservice: {{{service}}}\n", encoding="utf-8")
    assert why in refusal(str(file))


@pytest.mark.parametrize("url", ["/shared", "file:///shared", "s3://bucket/prefix"])
def test_a_shared_store_is_a_folder_or_a_url(tmp_path: Path, url: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"base_config: tiny\nservice: {{database: a, storage: {{url: '{url}'}}}}\n", encoding="utf-8")
    storage = load_deployment(str(file)).service.storage
    assert storage.folder == (None if url.startswith("s3") else Path("/shared"))
