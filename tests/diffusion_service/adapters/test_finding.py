"""Which file a start or a request means, and which it cannot mean."""

from pathlib import Path

import pytest

from diffusion_service.adapters.finding import display_name, find_allowed, find_artifact
from shared_schema.errors import AdapterNotFound, AdapterNotServed
from shared_schema.lora import CONTRACTS
from shared_schema.tasks import Task
from tests.adapters import ARTIFACT, REF_ARTIFACT


def touch(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def test_a_file_or_the_folder_that_holds_it_alone_is_the_artifact(tmp_path: Path) -> None:
    file = touch(tmp_path / ARTIFACT)
    touch(tmp_path / "README.md")
    assert find_artifact(file) == find_artifact(tmp_path) == (file, CONTRACTS[ARTIFACT])


def test_several_in_a_folder_are_listed(tmp_path: Path) -> None:
    touch(tmp_path / ARTIFACT)
    touch(tmp_path / REF_ARTIFACT)
    with pytest.raises(AdapterNotFound, match=f"holds 2 adapters, name one of them: {ARTIFACT}, {REF_ARTIFACT}"):
        find_artifact(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16.safetensors", f"for ComfyUI, .* take {ARTIFACT}$"),
        ("anything_comfyui_.safetensors", "for ComfyUI, with query, key and value fused$"),
        ("turbo.safetensors", f"turbo.safetensors is not the name of a Turbo adapter; .*{ARTIFACT}"),
        (ARTIFACT.upper().replace("SAFETENSORS", "safetensors"), "is not the name of a Turbo adapter"),
    ],
)
def test_exports_for_comfyui_and_renamed_files_are_refused_by_name(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(AdapterNotServed, match=says):
        find_artifact(touch(tmp_path / name))


def test_the_table_is_that_of_the_published_artifacts() -> None:
    rows = {
        name.removeprefix("minimax_h3_").removesuffix(".safetensors"): (
            contract.num_inference_steps,
            contract.flow_shift,
            contract.audio_flow_shift,
            contract.alpha,
        )
        for name, contract in CONTRACTS.items()
    }
    assert rows == {
        "fl2v_turbo_4step_v0.1": (5, 12, 3, 8),
        "fl2v_turbo_4step_v1.0_768p_bf16": (5, 6, 3, 128),
        "fl2v_turbo_4step_v1.1_768p_bf16": (5, 6, 3, 128),
        "fl2v_turbo_4step_v1.2_768p_bf16": (5, 6, 3, 8),
        "fl2v_turbo_8step_v1.0_bf16": (9, 12, 3, 8),
        "fl2v_turbo_8step_v1.0_768p_bf16": (9, 6, 3, 8),
        "ref2v_turbo_4step_v0.1_bf16": (5, 12, 3, 8),
        "ref2v_turbo_8step_v1.0_768p_bf16": (9, 6, 3, 8),
    }
    for name, contract in CONTRACTS.items():
        of_references = "_ref2v_" in name
        assert contract.tasks == ({Task.REF2VA} if of_references else {Task.T2VA, Task.FL2VA})
        assert f"_{contract.forwards}step_" in name


def test_a_request_finds_what_lies_in_an_allowed_folder(tmp_path: Path) -> None:
    root, other = tmp_path / "allowed", tmp_path / "other"
    peft = touch(root / "style" / "adapter_model.safetensors")
    single = touch(root / "single.safetensors")
    touch(other / "secret.safetensors")
    (root / "way_out.safetensors").symlink_to(other / "secret.safetensors")
    assert find_allowed([other, root], name="style", path=None) == peft
    for asked in ("single", "single.safetensors", "style/../single.safetensors", str(single)):
        assert find_allowed([other, root], name=None, path=asked) == single
    for asked in ("nothing", "../other/secret", str(other / "secret.safetensors"), "way_out", "", ".", "..", "a\0b"):
        with pytest.raises(AdapterNotFound):
            find_allowed([root], name=asked, path=None)
    assert [display_name(file) for file in (peft, single)] == ["style", "single.safetensors"]
