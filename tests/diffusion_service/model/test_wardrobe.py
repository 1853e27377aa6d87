"""An adapter that is taken off leaves the base, bit for bit, whatever was done to the weights' places since loading."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.binding import bind
from diffusion_service.model.adaln import Modulation
from diffusion_service.model.attention import attend_with, join_qkv, norm_and_rotate, use_attention
from diffusion_service.model.dit import Dit
from diffusion_service.model.lora import LoraDeltas
from diffusion_service.model.wardrobe import Wardrobe, places_of
from diffusion_service.parallel.tensor import DIT_PLAN, use_local_heads
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.sharding import Sharding
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_transformer
from shared_schema.errors import DeployError, JobFailed
from tests.adapters import made_pairs, shapes_of, write_adapter
from tests.diffusion_service.parallel.dit_forward import inputs, step
from tests.ranks import Ranks

SWAPS = "tests.diffusion_service.model.test_wardrobe:"
ATTN = "transformer_blocks.1.attn.to_k"


def adapters_in(folder: Path) -> list[Adapter]:
    """One of every linear, one of a few."""
    shapes = shapes_of(tiny_checkpoint())
    few = {name: shape for name, shape in shapes.items() if name.startswith("transformer_blocks.1.")}
    files = [
        write_adapter(folder / f"{seed}.safetensors", made_pairs(some, seed=seed, dtype=torch.bfloat16, spread=0.1))
        for seed, some in enumerate((shapes, few))
    ]
    return [bind(file, "transformer", shapes, name=file.name, scale=1.0) for file in files]


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    return adapters_in(tmp_path)


def dressed(comm: RankComm, adapter: Adapter | None = None, *, joined: bool = False) -> tuple[Dit, Wardrobe]:
    """A partition as a rank makes it ready, loaded with `adapter`; `joined` as on one GPU."""
    sharding, attend = Sharding(DIT_PLAN, comm), attend_with("TORCH_SDPA")
    deltas = None if adapter is None else LoraDeltas(adapter, comm.device)
    transformer = load_transformer(tiny_checkpoint(), "transformer", comm.device, sharding, deltas=deltas)
    use_local_heads(transformer, comm)
    use_attention(transformer, attend)
    dit = Dit(transformer, Modulation(transformer, on_host=False))
    if joined:
        join_qkv(transformer, attend, norm_and_rotate)
    return dit, Wardrobe(tiny_checkpoint(), "transformer", dit, sharding, comm)


def forward(dit: Dit) -> torch.Tensor:
    video, audio = step(dit, inputs(5, dit.transformer.config, torch.float32))
    return torch.cat([video.flatten(), audio.flatten()])


def weights(dit: Dit) -> dict[str, torch.Tensor]:
    return {name: place.clone() for name, place in places_of(dit).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one)


def swap_everything(comm: RankComm, _task: TaskHandle, folder: Path, joined: bool) -> None:
    """All that must hold of one rank; asserts are raised on the leader."""
    every, few = adapters_in(folder)
    beats: list[None] = []
    dit, wardrobe = dressed(comm, joined=joined)
    base, plain = weights(dit), forward(dit)
    for adapter in (every, few, replace(every, scale=0.5), few):
        wardrobe.wear(adapter, lambda: beats.append(None))
        fresh, _ = dressed(comm, adapter, joined=joined)
        assert equal(weights(dit), weights(fresh))
        assert torch.equal(forward(dit), forward(fresh))
        assert not torch.equal(forward(dit), plain)
    wardrobe.wear(None, lambda: None)
    assert equal(weights(dit), base)
    assert torch.equal(forward(dit), plain)
    wardrobe.wear(replace(every, scale=0.0), lambda: None)
    assert equal(weights(dit), base), "case 73: scale 0 is none"
    read = len(beats)
    wardrobe.wear(few, lambda: beats.append(None))
    assert len(beats) == read + len(few.modules)
    wardrobe.wear(few, lambda: beats.append(None))
    assert len(beats) == read + len(few.modules), "what is worn already is not read again"


@pytest.mark.parametrize("joined", [False, True])
def test_what_comes_after_an_adapter_is_what_loading_makes(ranks: Ranks, tmp_path: Path, joined: bool) -> None:
    ranks.run(Mesh(), SWAPS + "swap_everything", tmp_path, joined)


def test_every_rank_changes_its_own_part(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(Mesh(tp=2), SWAPS + "swap_everything", tmp_path, False)


def swap_often(comm: RankComm, _task: TaskHandle, folder: Path) -> list[int]:
    """Resident bytes after every swap of two adapters and none, in turn."""
    every, few = adapters_in(folder)
    dit, wardrobe = dressed(comm)
    base, resident = weights(dit), []
    for number in range(50):
        wardrobe.wear((every, few, None)[number % 3], lambda: None)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident.append(pages * 4096)
    wardrobe.wear(None, lambda: None)
    assert equal(weights(dit), base)
    return resident


def test_fifty_swaps_leave_memory_flat(ranks: Ranks, tmp_path: Path) -> None:
    resident = ranks.run(Mesh(), SWAPS + "swap_often", tmp_path)
    assert max(resident[25:]) - max(resident[5:25]) < 2**20


class Alone:
    """What a wardrobe asks of a group of one."""

    device = torch.device("cpu")

    def agree(self, error: Exception | None) -> None:
        if error is not None:
            raise error

    def group(self, _axis: str) -> None:
        return None

    def size(self, _axis: str) -> int:
        return 1

    def index(self, _axis: str) -> int:
        return 0

    world_size = 1


def test_a_file_that_is_gone_fails_the_job_and_changes_nothing(adapters: list[Adapter]) -> None:
    comm: Any = Alone()
    dit, wardrobe = dressed(comm)
    base = weights(dit)
    adapters[0].file.unlink()
    with pytest.raises(JobFailed, match=r"0\.safetensors cannot be read any more") as caught:
        wardrobe.wear(adapters[0], lambda: None)
    assert caught.value.code == "invalid_input"
    assert equal(weights(dit), base)
    wardrobe.wear(adapters[1], lambda: None)
    assert not equal(weights(dit), base)


def test_a_change_that_broke_off_is_made_good_by_the_next_job(adapters: list[Adapter]) -> None:
    comm: Any = Alone()
    dit, wardrobe = dressed(comm)
    base = weights(dit)

    def stop() -> None:
        raise DeployError("the disk is gone")

    with pytest.raises(DeployError):
        wardrobe.wear(adapters[0], stop)
    assert not equal(weights(dit), base)
    wardrobe.wear(None, lambda: None)
    assert equal(weights(dit), base)


def test_a_file_that_is_written_anew_is_another_adapter(adapters: list[Adapter]) -> None:
    comm: Any = Alone()
    dit, wardrobe = dressed(comm)
    few = adapters[1]
    wardrobe.wear(few, lambda: None)
    before = weights(dit)
    save_file({name: tensor * 2 for name, tensor in load_file(few.file).items()}, few.file)
    again = bind(few.file, "transformer", shapes_of(tiny_checkpoint()), name=few.name, scale=few.scale)
    wardrobe.wear(again, lambda: None)
    assert not torch.equal(weights(dit)[f"{ATTN}.weight"], before[f"{ATTN}.weight"])
