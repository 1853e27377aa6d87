"""One DiT forward on whatever ranks there are: runs in the ranks of `tests.ranks`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.model.adaln import Modulation
from diffusion_service.model.attention import Attend, attend_with, join_qkv, norm_and_rotate, use_attention
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Dit, Moment, Rows
from diffusion_service.model.lora import LoraDeltas
from diffusion_service.parallel.tensor import DIT_PLAN, use_local_heads
from diffusion_service.parallel.ulysses import SequenceShard, attend_by_heads
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.sharding import Sharding
from shared_runtime.weights import load_transformer, weight_bytes


@dataclass(frozen=True)
class Forward:
    """What one rank saw and the leader returns."""

    video: torch.Tensor
    audio: torch.Tensor
    rank_bytes: list[int]
    agree: bool


def forward(
    comm: RankComm,
    _task: TaskHandle,
    path: Path,
    partition: Any,
    text_rows: int,
    dtype: torch.dtype,
    adapter: Adapter | None = None,
) -> Forward:
    """Outputs for a packed sequence of `text_rows` + 10 audio + 30 video rows; whether all ranks have the same."""
    deltas = None if adapter is None else LoraDeltas(adapter, comm.device)
    transformer = load_transformer(path, partition, comm.device, Sharding(DIT_PLAN, comm), deltas=deltas)
    size = weight_bytes(transformer)
    dit, _ = fitted(transformer.to(dtype), comm)
    return _made(comm, size, *step(dit, inputs(text_rows, transformer.config, dtype)))


def every_length(comm: RankComm, _task: TaskHandle, path: Path, lengths: list[int]) -> tuple[list[Forward], int]:
    """The same in FP32 for several `text_rows`, one after the other, with blocks as GPUs run them: one product for
    query, key and value, and compiled. And how many graphs that took."""
    transformer = load_transformer(path, "transformer", comm.device, Sharding(DIT_PLAN, comm)).float()
    dit, attend = fitted(transformer, comm)
    join_qkv(transformer, attend, norm_and_rotate)
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(transformer.transformer_blocks, backend="aot_eager")
    dit.warm_up(200)
    made = [_made(comm, 0, *step(dit, inputs(each, transformer.config, torch.float32))) for each in lengths]
    return made, counters["stats"]["unique_graphs"]


def fitted(transformer: Any, comm: RankComm) -> tuple[Dit, Attend]:
    """A loaded share, made to work with the others', and what its blocks attend with."""
    attend, split = attend_with("TORCH_SDPA"), None
    use_local_heads(transformer, comm)
    use_attention(transformer, attend)
    if comm.size("ulysses") > 1:
        split = SequenceShard(comm)
        attend = attend_by_heads(split, "TORCH_SDPA")
        use_attention(transformer.transformer_blocks, attend)
    return Dit(transformer, Modulation(transformer, on_host=False), split), attend


def _made(comm: RankComm, size: int, video: torch.Tensor, audio: torch.Tensor) -> Forward:
    mine = (size, video.float().sum().item(), audio.float().sum().item())
    told = [mine] * comm.world_size
    if comm.world_size > 1:
        torch.distributed.all_gather_object(told, mine, group=comm.world)
    return Forward(video.float(), audio.float(), [each[0] for each in told], len({each[1:] for each in told}) == 1)


def step(dit: Dit, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The one step of a request with these inputs, those of diffusers' forward."""
    moment = Moment(given["timestep"], given["timestep_indices"])
    denoising = dit.begin(given["encoder_hidden_states"], Rows.from_layout(given), [moment])
    return denoising.step(0, given["hidden_states"], given["audio_hidden_states"])


def inputs(text_rows: int, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A packed sequence of text, sound and picture at two noise levels."""
    random = torch.Generator().manual_seed(text_rows)
    audio_rows, video_rows = 10, 30
    length = text_rows + audio_rows + video_rows

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    tags = torch.tensor([1] * text_rows + [2] * audio_rows + [0] * video_rows)
    return {
        "hidden_states": noise(1, video_rows, 4 * config.in_channels),
        "audio_hidden_states": noise(1, audio_rows, config.audio_in_channels),
        "encoder_hidden_states": noise(1, text_rows, config.text_dim),
        "timestep": torch.tensor([0.3, 0.7]),
        "timestep_indices": (torch.arange(length) >= text_rows + audio_rows).long(),
        "token_tags": tags,
        "position_ids": torch.arange(length, dtype=torch.float64)[:, None].expand(-1, 3) / 3,
        "video_indices": torch.arange(text_rows + audio_rows, length),
        "audio_indices": torch.arange(text_rows, text_rows + audio_rows),
        "text_indices": torch.arange(text_rows),
    }
