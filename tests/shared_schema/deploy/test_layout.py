"""What a service says about itself when it starts."""

from shared_schema.deploy.layout import layout_of, start_lines
from shared_schema.deploy.load import load_deployment


def test_the_layout_has_every_default_resolved() -> None:
    layout = layout_of(load_deployment("minimax_h3_disaggregated"))
    assert layout["encoder"]["video_vae"] == "patch"
    assert layout["diffusion"]["vae_decode_precision"] == "fp16"
    assert layout_of(load_deployment("tiny"))["diffusion"]["vae_decode_precision"] == "fp32"


def test_a_start_logs_one_line_a_stage_and_the_keys_without_effect() -> None:
    assert start_lines(load_deployment("tiny")) == [
        "encoder: devices cpu, tensor_parallel_size 1, text_encoder tp, video_vae patch, audio_vae leader, "
        "load_format safetensors, connector SharedMemoryConnector",
        "diffusion: devices cpu, tensor_parallel_size 1, ulysses_degree 1, vae_patch_parallel_size 1, split full, "
        "vae_decode_precision fp32, load_format safetensors",
    ]
    lines = start_lines(load_deployment("minimax_h3_disaggregated_text"))
    assert "video_vae" not in lines[0]
    assert "split text-only" in lines[1]
    assert lines[2] == "read and without effect: trust_remote_code, stages[0].gpu_memory_utilization"
