"""A merged adapter is what merging by hand gives, and every parallel plan merges the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.binding import bind
from diffusion_service.model.lora import LoraDeltas
from shared_runtime.ranks.mesh import Mesh
from shared_runtime.stored import StoredTensor
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_transformer, read_weight
from shared_schema.errors import AdapterBroken
from tests.adapters import made_pairs, shapes_of, write_adapter
from tests.diffusion_service.parallel.test_plans import FORWARD, difference
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_checkpoint()


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """Of every linear that there is: each kind of cut, and what is not cut."""
    shapes = shapes_of(checkpoint)
    file = tmp_path_factory.mktemp("lora") / "all.safetensors"
    write_adapter(file, made_pairs(shapes, dtype=torch.bfloat16, spread=0.1), metadata={"alpha": "6"})
    return bind(file, "transformer", shapes, name="all", scale=1.0)


def weights(checkpoint: Path, adapter: Adapter | None = None) -> dict[str, torch.Tensor]:
    deltas = None if adapter is None else LoraDeltas(adapter, CPU)
    return dict(load_transformer(checkpoint, "transformer", "cpu", deltas=deltas).state_dict())


@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
def test_merging_is_what_it_is_by_hand(checkpoint: Path, adapter: Adapter, scale: float) -> None:
    base, merged = weights(checkpoint), weights(checkpoint, replace(adapter, scale=scale))
    tensors = load_file(adapter.file)
    touched = {f"{each.module}.weight" for each in adapter.modules}
    assert len(touched) == len(shapes_of(checkpoint))
    for name, weight in merged.items():
        module = name.removesuffix(".weight")
        expected = base[name]
        if name in touched:
            up, down = (tensors[f"{module}.lora_{kind}.default.weight"].float() for kind in "BA")
            expected = (base[name].float() + scale * 1.5 * (up @ down)).to(base[name].dtype)
            assert not torch.equal(expected, base[name])
        assert weight.dtype == base[name].dtype
        assert torch.equal(weight, expected), name


def test_scale_0_is_no_adapter_bit_for_bit(checkpoint: Path, adapter: Adapter) -> None:
    # case 73
    base, merged = weights(checkpoint), weights(checkpoint, replace(adapter, scale=0.0))
    for name in base:
        assert base[name].contiguous().view(torch.uint8).equal(merged[name].contiguous().view(torch.uint8))


def test_swapped_halves_are_put_right(checkpoint: Path, adapter: Adapter, tmp_path: Path) -> None:
    module = "transformer_blocks.0.ff.net.0.proj"
    shapes = {module: shapes_of(checkpoint)[module]}
    pairs = made_pairs(shapes, dtype=torch.float32)
    straight = write_adapter(tmp_path / "straight.safetensors", pairs)
    down, up = pairs[module]
    other = {"blocks.0.mlp.fc1": (down, torch.cat([up[len(up) // 2 :], up[: len(up) // 2]]))}
    turned = write_adapter(tmp_path / "turned.safetensors", other)
    made = [
        weights(checkpoint, bind(file, "transformer", shapes_of(checkpoint), name="x", scale=1.0))[f"{module}.weight"]
        for file in (straight, turned)
    ]
    assert torch.equal(*made)
    assert not torch.equal(made[0], weights(checkpoint)[f"{module}.weight"])


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(ulysses=2), Mesh(tp=2, ulysses=2)], ids=str)
def test_every_plan_merges_its_part(ranks: Ranks, checkpoint: Path, adapter: Adapter, mesh: Mesh) -> None:
    base = ranks.run(Mesh(), FORWARD, checkpoint, "transformer", 5, torch.float32)
    alone = ranks.run(Mesh(), FORWARD, checkpoint, "transformer", 5, torch.float32, adapter)
    spread = ranks.run(mesh, FORWARD, checkpoint, "transformer", 5, torch.float32, adapter)
    assert difference(alone.video, base.video) > 0.1
    assert difference(alone.audio, base.audio) > 0.1
    assert difference(alone.video, spread.video) <= 1e-5
    assert difference(alone.audio, spread.audio) <= 1e-5
    assert spread.agree


def test_a_file_that_changed_after_it_was_bound_is_refused(checkpoint: Path, adapter: Adapter, tmp_path: Path) -> None:
    moved = replace(adapter, file=tmp_path / "all.safetensors")
    with pytest.raises(AdapterBroken, match="all cannot be read any more"):
        LoraDeltas(moved, CPU)
    write_adapter(moved.file, {"x": (torch.zeros(1, 1), torch.zeros(1, 1))})
    with pytest.raises(AdapterBroken, match="all has changed since it was checked"):
        LoraDeltas(moved, CPU)


def test_a_bf16_weight_is_added_to_in_fp32_and_rounded_once() -> None:
    base, delta = torch.full((4, 4), 1.0, dtype=torch.bfloat16), torch.full((4, 4), 0.0039)
    # In BF16 the delta itself would be rounded first, to 0.00390625: half a step, which goes to even, so to 1.0.
    base[0] += 2**-7

    class Added:
        def of(self, name: str) -> torch.Tensor | None:
            return delta if name == "x" else None

    stored = StoredTensor(Path("none"), "BF16", (4, 4), slice(0, 32))
    merged = read_weight("x", stored, base, CPU, None, Added())
    assert merged.dtype is torch.bfloat16
    assert torch.equal(merged, (base.float() + delta).to(torch.bfloat16))
    assert not torch.equal(merged, base + delta.to(torch.bfloat16))
    assert torch.equal(read_weight("y", stored, base, CPU, None, Added()), base)
