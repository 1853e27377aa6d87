"""Deploy files as people have them: loaded unchanged, inherited, overridden, and refused with one line."""

import json
from pathlib import Path

import pytest

from shared_schema.deploy.load import OwnDevices, load_deployment, resolved_text
from shared_schema.deploy.model import Deployment, NixlConnector
from shared_schema.errors import DeployError

BASE = "minimax_h3_disaggregated"

VOCABULARY = """
pipeline: minimax_h3_disaggregated      # the only pipeline
async_chunk: false                      # must be false
trust_remote_code: true                 # accepted; no remote code is ever run
distributed_executor_backend: mp        # or ray
connectors:
  shared_memory_connector: {name: SharedMemoryConnector}
stages:
  - stage_id: 0                         # encoder
    devices: "0,1"
    max_num_seqs: 1
    gpu_memory_utilization: 0.6
    tensor_parallel_size: 2
    output_connectors: {to_stage_1: shared_memory_connector}
    hf_overrides:
      minimax_h3_encoder_components:
        text_encoder: {parallel_mode: tp}
        video_vae: {parallel_mode: patch}
        audio_vae: {parallel_mode: leader}
    default_sampling_params: {max_tokens: 1, temperature: 0.0, detokenize: false}
  - stage_id: 1                         # diffusion
    devices: "2,3,4,5"
    max_num_seqs: 1
    model_loaded: {text_encoder: false, vae_encoder: false}
    parallel_config: {tensor_parallel_size: 1, ulysses_degree: 4, vae_patch_parallel_size: 4}
    stage_input_payload_keys: [encoder_output]
    input_connectors: {from_stage_0: shared_memory_connector}
    default_sampling_params: {seed: 42, num_inference_steps: 50}
"""

ALSO_READ = """
    vae_use_tiling: true
    vae_parallel_mode: tile
    ring_degree: 1
    cfg_parallel_size: 1
    pipeline_parallel_size: 1
    data_parallel_size: 1
    allgather_degree: 1
    step_execution: false
    enforce_eager: true
    diffusion_attention_backend: FLASH_ATTN
    quantization_config: {transformer: {method: fp8, ignored_layers: [proj_out]}}
    diffusion_offload_config:
      mode: layer
      components: [dit]
      layer_options: {dit: {weight_transfer: rank-local, resident_layers: 20}}
      pin_memory: true
platforms:
  cuda:
    stages:
      - {stage_id: 1, enforce_eager: false}
  npu:
    stages:
      - {stage_id: 1, block_size: 128}
"""

NIXL_OVERLAY = """
base_config: minimax_h3_disaggregated.yaml
connectors:
  nixl_connector:
    name: NixlConnector
    extra:
      host: auto
      zmq_port: 50071
      backends: [UCX]
      role: sender
      stage_id: 0
      agent_name: h3
      num_threads: 4
      sender_host: 10.0.0.1
      sender_zmq_port: 50072
      receive_device: cpu
      memory_type: DRAM
      lease_seconds: 3600
      transfer_timeout_s: 300.0
      poll_interval_s: 0.001
      handshake_timeout_ms: 5000
      handshake_max_wait_s: 60
      handshake_retry_s: 0.05
      metadata_query_timeout_ms: 10
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: nixl_connector}}
  - {stage_id: 1, input_connectors: {from_stage_0: nixl_connector}}
"""


def written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def refusal(name: str, overrides: str | None = None) -> str:
    with pytest.raises(DeployError) as caught:
        load_deployment(name, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_file_that_people_have_loads_unchanged(tmp_path: Path) -> None:
    assert load_deployment(written(tmp_path, VOCABULARY)) == load_deployment(BASE)


def test_every_other_key_that_people_have_is_read(tmp_path: Path) -> None:
    deployment = load_deployment(written(tmp_path, VOCABULARY + ALSO_READ.lstrip("\n")))
    stage = deployment.diffusion
    assert stage.parallel_config == load_deployment(BASE).diffusion.parallel_config
    assert stage.diffusion_attention_backend == "FLASH_ATTN"
    assert stage.diffusion_quantization_config is not None
    assert stage.diffusion_quantization_config.transformer.ignored_layers == ("proj_out",)
    assert stage.diffusion_offload_config is not None
    assert stage.diffusion_offload_config.layer_options.dit.resident_layers == 20


def test_the_cuda_part_of_platforms_lies_over_the_stages_and_the_others_are_not_read(tmp_path: Path) -> None:
    deployment = load_deployment(written(tmp_path, VOCABULARY + ALSO_READ.lstrip("\n")))
    assert deployment.diffusion.enforce_eager is False


def test_an_unknown_key_under_platforms_is_named_with_its_place(tmp_path: Path) -> None:
    wrong = VOCABULARY + "platforms: {cuda: {stages: [{stage_id: 1, block_size: 128}]}}\n"
    assert "(platforms.cuda): stages[1].block_size: unknown key" in refusal(written(tmp_path, wrong))
    wrong = VOCABULARY + "platforms: {cuda: {model_runner: v1}}\n"
    assert "platforms.cuda.model_runner: unknown key" in refusal(written(tmp_path, wrong))


def test_every_nixl_option_of_vllm_omni_is_read(tmp_path: Path) -> None:
    deployment = load_deployment(written(tmp_path, NIXL_OVERLAY))
    assert deployment.connector == "NixlConnector"
    connector = deployment.connectors["nixl_connector"]
    assert isinstance(connector, NixlConnector)
    assert connector.extra.metadata_query_timeout_ms == 10


def test_an_edge_without_connectors_is_shared_memory(tmp_path: Path) -> None:
    lines = [line for line in VOCABULARY.splitlines() if "connector" not in line]
    deployment = load_deployment(written(tmp_path, "\n".join(lines)))
    assert deployment.connectors == {}
    assert deployment.connector == "SharedMemoryConnector"


def test_vae_encoder_that_is_not_named_is_true_and_means_the_text_only_split(tmp_path: Path) -> None:
    text = VOCABULARY.replace("text_encoder: false, vae_encoder: false", "text_encoder: false")
    text = text.replace("        video_vae: {parallel_mode: patch}\n        audio_vae: {parallel_mode: leader}\n", "")
    assert load_deployment(written(tmp_path, text)).diffusion.text_only


def test_model_loaded_without_text_encoder_is_refused(tmp_path: Path) -> None:
    text = VOCABULARY.replace("text_encoder: false, vae_encoder: false", "vae_encoder: false")
    assert "stages[1].model_loaded.text_encoder: is missing" in refusal(written(tmp_path, text))
    text = VOCABULARY.replace("text_encoder: false, vae", "text_encoder: true, vae")
    assert "stages[1].model_loaded.text_encoder: must be false" in refusal(written(tmp_path, text))


def test_base_config_is_the_file_beside_before_the_preset(tmp_path: Path) -> None:
    written(tmp_path, VOCABULARY.replace("0.6", "0.5"), f"{BASE}.yaml")
    overlay = written(tmp_path, f"base_config: {BASE}.yaml\n")
    assert load_deployment(overlay).encoder.gpu_memory_utilization == 0.5
    (tmp_path / f"{BASE}.yaml").unlink()
    assert load_deployment(overlay).encoder.gpu_memory_utilization == 0.6
    assert load_deployment(written(tmp_path, f"base_config: {BASE}\n")) == load_deployment(BASE)


def test_inheritance_over_three_files_keeps_the_topmost_word(tmp_path: Path) -> None:
    written(tmp_path, "base_config: tiny\nservice: {queue_limit: 5, lease_s: 7}\n", "a.yaml")
    top = written(tmp_path, "base_config: a.yaml\nservice: {queue_limit: 6}\n", "b.yaml")
    service = load_deployment(top).service
    assert (service.queue_limit, service.lease_s, service.slab_bytes) == (6, 7, 64 * 2**20)


def test_a_file_that_inherits_from_itself_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "base_config: b.yaml\n", "a.yaml")
    assert "base_config: inherits from itself" in refusal(written(tmp_path, "base_config: a.yaml\n", "b.yaml"))


def test_an_unknown_key_is_named_with_the_file_that_has_it_and_its_path(tmp_path: Path) -> None:
    below = written(tmp_path, "base_config: tiny\nservice: {slab_byte: 7}\n", "below.yaml")
    assert refusal(below) == f"{below}: service.slab_byte: unknown key, did you mean `slab_bytes`?"
    top = written(tmp_path, "base_config: below.yaml\nservice: {lease_s: 7}\n", "top.yaml")
    assert refusal(top).startswith(f"{below}: service.slab_byte: ")


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("zzz: 1", "zzz"),
        ("model: {zzz: 1}", "model.zzz"),
        ("connectors: {shared_memory_connector: {zzz: 1}}", "connectors.shared_memory_connector.zzz"),
        ("connectors: {x: {name: NixlConnector, extra: {zzz: 1}}}", "connectors.x.extra.zzz"),
        ("service: {media_caps: {zzz: 1}}", "service.media_caps.zzz"),
        ("stages: [{stage_id: 0, hf_overrides: {zzz: 1}}]", "stages[0].hf_overrides.zzz"),
        ("stages: [{stage_id: 1, zzz: 1}]", "stages[1].zzz"),
        ("stages: [{stage_id: 1, input_connectors: {zzz: x}}]", "stages[1].input_connectors.zzz"),
        (
            "stages: [{stage_id: 1, default_sampling_params: {extra_args: {zzz: 1}}}]",
            "stages[1].default_sampling_params.extra_args.zzz",
        ),
    ],
)
def test_unknown_keys_are_refused_at_every_depth(tmp_path: Path, line: str, path: str) -> None:
    file = written(tmp_path, f"base_config: tiny\n{line}\n")
    assert refusal(file).startswith(f"{file}: {path}: ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("async_chunk: true", "async_chunk: must be false: a payload travels whole"),
        ("pipeline: other", "pipeline: should be 'minimax_h3_disaggregated', not \"other\""),
        ("distributed_executor_backend: uni", "distributed_executor_backend: should be 'mp' or 'ray'"),
        ("connectors: {x: {name: MooncakeConnector}}", "connectors.x: "),
        ("service: {queue_limit: 0}", "service.queue_limit: should be greater than 0"),
        ("service: {queue_limit: '7'}", "service.queue_limit: should be a valid integer"),
        ("service: {queue_limit: 1, queue_limit: 2}", "line 2: names `queue_limit` twice"),
        ("service: {1: 2}", "service: keys are text, not 1"),
        ("service: 7", "service: "),
        ("stages: {}", "stages: must be a list"),
        ("stages: [7]", "stages[0]: must be a mapping"),
        ("stages: [{devices: cpu}]", "stages[0].stage_id: unknown stage None"),
        ("stages: [{stage_id: 2}]", "stages[0].stage_id: unknown stage 2: stages are 0 (encoder) and 1 (diffusion)"),
        ("stages: [{stage_id: true}]", "stages[0].stage_id: unknown stage True"),
        ("stages: [{stage_id: 0}, {stage_id: 0}]", "stages: stage 0 is listed twice"),
        ("stages: [", "line 3: "),
        ("base_config: 7", "base_config"),
    ],
)
def test_wrong_values_are_one_line(tmp_path: Path, line: str, message: str) -> None:
    base = "" if line.startswith("base_config") else "base_config: tiny\n"
    assert message in refusal(written(tmp_path, f"{base}{line}\n"))


def test_a_file_without_one_of_the_stages_is_refused(tmp_path: Path) -> None:
    assert "stages: stage 0 (encoder) is missing" in refusal(written(tmp_path, "async_chunk: false\n"))
    lone = "stages: [{stage_id: 0, devices: cpu}]\n"
    assert "stages: stage 1 (diffusion) is missing" in refusal(written(tmp_path, lone))


def test_a_name_that_is_neither_file_nor_preset_lists_the_presets(tmp_path: Path) -> None:
    assert "the presets are demo, minimax_h3_disaggregated, " in refusal(str(tmp_path / "none.yaml"))
    assert "tiny_parallel" in refusal("tinny")


def test_a_folder_called_like_a_preset_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_deployment("tiny").encoder.devices == ("cpu",)
    assert load_deployment("tiny.yaml") == load_deployment("tiny")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("{", "--stage-overrides: is not JSON: "),
        ("[]", "--stage-overrides: must be a mapping"),
        ('{"2":{}}', "unknown stage 2"),
        ('{"encoder":{}}', "unknown stage 'encoder'"),
        ('{"1":[]}', "stages[1]: must be a mapping"),
        ('{"1":{"ulyses_degree":1}}', "stages[1].ulyses_degree: unknown key, did you mean `ulysses_degree`?"),
        ('{"1":{"tensor_parallel_size":"4"}}', "parallel_config.tensor_parallel_size: should be a valid integer"),
        ('{"1":{"tensor_parallel_size":true}}', "parallel_config.tensor_parallel_size: should be a valid integer"),
        ('{"1":{"ring_degree":2}}', "stages[1].parallel_config.ring_degree: must be 1"),
        ('{"1":{"vae_parallel_mode":"row"}}', "stages[1].parallel_config.vae_parallel_mode: should be 'tile'"),
        ('{"1":{"max_num_seqs":2}}', "stages[1].max_num_seqs: must be 1"),
        ('{"0":{"ulysses_degree":2}}', "stages[0].ulysses_degree: unknown key"),
        ('{"0":{"enable_cpu_offload":true}}', "stages[0].enable_cpu_offload: belongs to stage 1"),
        ('{"0":{"quantization_config":{}}}', "stages[0].quantization_config: belongs to stage 1"),
        (
            '{"0":{"default_sampling_params":{"temperature":0.7}}}',
            "stages[0].default_sampling_params.temperature: must",
        ),
        ('{"1":{"default_sampling_params":{"num_inference_steps":1}}}', "num_inference_steps: should be greater than"),
        ('{"1":{"default_sampling_params":{"extra_args":{"flow_shift":0}}}}', "flow_shift: should be greater than 0"),
        ('{"1":{"diffusion_quantization_config":"fp8"}}', "diffusion_quantization_config: is not JSON"),
        ('{"1":{"diffusion_quantization_config":{"text_encoder":{}}}}', "diffusion_quantization_config.t"),
        ('{"1":{"devices":""}}', "stages[1].devices: lists GPU indices or `cpu`"),
        ('{"1":{"devices":"2,cpu"}}', "stages[1].devices: lists GPU indices or `cpu`"),
        ('{"1":{"devices":"2,2,3,4"}}', "stages[1].devices: names a GPU twice"),
        ('{"1":{"devices":"2","devices":"3"}}', "names `devices` twice"),
        (
            '{"1":{"ulysses_degree":2,"parallel_config":{"ulysses_degree":4}}}',
            "stages[1].ulysses_degree: is 2 here and 4",
        ),
        ('{"1":{"quantization_config":{},"diffusion_quantization_config":{}}}', "give one of them"),
        ('{"1":{"stage_input_payload_keys":["kv"]}}', "stages[1].stage_input_payload_keys[0]: should be 'encoder_outp"),
    ],
)
def test_wrong_overrides_are_one_line_that_names_the_flag(overrides: str, message: str) -> None:
    text = refusal(BASE, overrides)
    assert text.startswith("--stage-overrides: ")
    assert message in text


def test_one_device_may_be_a_plain_number(tmp_path: Path) -> None:
    text = VOCABULARY.replace('devices: "0,1"', "devices: 0").replace(
        "tensor_parallel_size: 2", "tensor_parallel_size: 1"
    )
    assert load_deployment(written(tmp_path, text)).encoder.devices == ("0",)


def test_devices_of_one_service_replace_its_own_stage_alone() -> None:
    deployment = load_deployment(BASE, devices=OwnDevices(1, "0,1,2,3"))
    assert deployment.diffusion.devices == ("0", "1", "2", "3")
    assert deployment.encoder.devices == ("0", "1")
    with pytest.raises(DeployError, match=r"^--devices: stages\[1\]\.devices: must list 4 "):
        load_deployment(BASE, devices=OwnDevices(1, "0,1"))


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("name", ["tiny", "minimax_h3_disaggregated_turbo_nixl", "minimax_h3_disaggregated_text"])
def test_the_resolved_text_loads_again_to_the_same_deployment(tmp_path: Path, name: str, as_json: bool) -> None:
    deployment = load_deployment(name, '{"1":{"vae_decode_precision":"fp32"}}')
    assert load_deployment(written(tmp_path, resolved_text(deployment, as_json=as_json))) == deployment


def test_the_resolved_text_shows_no_token(tmp_path: Path) -> None:
    deployment = load_deployment(written(tmp_path, "base_config: tiny\nservice: {internal_token: hush}\n"))
    assert "hush" not in resolved_text(deployment, as_json=True) + repr(deployment)


def test_every_block_of_the_model_is_frozen() -> None:
    deployment: Deployment = load_deployment("tiny")
    with pytest.raises(ValueError, match="frozen"):
        deployment.service.queue_limit = 1  # type: ignore[misc]


def test_json_text_and_object_of_the_quantization_are_the_same() -> None:
    quantization = {"transformer": {"method": "fp8"}}
    as_text = load_deployment(BASE, json.dumps({"1": {"diffusion_quantization_config": json.dumps(quantization)}}))
    as_object = load_deployment(BASE, json.dumps({"1": {"diffusion_quantization_config": quantization}}))
    assert as_text == as_object
    assert as_text.diffusion.diffusion_quantization_config is not None


def test_media_caps_may_be_lowered_and_not_raised(tmp_path: Path) -> None:
    lower = written(tmp_path, "base_config: tiny\nservice: {media_caps: {video_bytes: 1000}}\n")
    assert load_deployment(str(lower)).service.media_caps.video_bytes == 1000
    higher = written(tmp_path, "base_config: tiny\nservice: {media_caps: {image_pixels: 50000001}}\n")
    assert "service.media_caps.image_pixels: is at most 50000000" in refusal(higher)
