from pathlib import Path

import torch
from safetensors.torch import load_file

from diffusion_service.adapters.binding import bind, linears
from diffusion_service.adapters.finding import find_artifact
from shared_runtime.stored import stored_tensors
from training.folder import PARTITIONS, read_component
from training.turbo import ALPHA, ARTIFACTS, FORWARDS, RANK, adapt, write_adapter


def test_an_adapter_changes_nothing_at_first_and_alone_learns(untrained: Path) -> None:
    model = read_component(untrained, "transformer")
    rows = torch.randn(5, 192)
    before = model.transformer_blocks[0].ff(rows)
    adapters = adapt(model)
    assert torch.equal(model.transformer_blocks[0].ff(rows), before)
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert learning == {f"{name}.{side}" for name in adapters for side in ("down", "up")}


def test_the_service_binds_the_file_whole_with_the_schedule_of_its_name(untrained: Path, tmp_path: Path) -> None:
    for partition in PARTITIONS:
        adapters = adapt(read_component(untrained, partition))
        file = tmp_path / partition / ARTIFACTS[partition]
        with torch.no_grad():
            for each in adapters.values():
                each.up.normal_()
        write_adapter(file, adapters)
        found, contract = find_artifact(file)
        assert contract.forwards == FORWARDS
        assert (contract.flow_shift, contract.audio_flow_shift, contract.alpha) == (12, 3, ALPHA)
        shapes = linears(stored_tensors(untrained, partition))  # type: ignore[arg-type]
        bound = bind(found, partition, shapes, name="turbo", scale=1.0)  # type: ignore[arg-type]
        assert {module.module for module in bound.modules} == set(adapters)
        assert {module.factor for module in bound.modules} == {ALPHA / RANK}
        name, one = next(iter(adapters.items()))
        rows = torch.randn(3, one.base.in_features)
        stored = load_file(file)
        down, up = (stored[f"{name}.{side}.default.weight"].float() for side in ("lora_A", "lora_B"))
        added = one(rows) - one.base(rows)
        torch.testing.assert_close(rows @ down.T @ up.T * (ALPHA / RANK), added, atol=0.05, rtol=0.05)
