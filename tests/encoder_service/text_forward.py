"""The text encoder on whatever ranks there are: runs in the ranks of `tests.ranks`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

from encoder_service.parallel import TEXT_PLAN
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.sharding import Sharding
from shared_runtime.weights import load_processor, load_text_encoder, weight_bytes


@dataclass(frozen=True)
class Embedded:
    """What the leader returns."""

    embeds: torch.Tensor
    rank_bytes: list[int]
    agree: bool


def embed(comm: RankComm, _task: TaskHandle, path: Path, tokens: list[int], dtype: torch.dtype) -> Embedded:
    """The 50th hidden state of `tokens`, and whether all ranks have the same."""
    sharding = Sharding(TEXT_PLAN, comm)
    encoder = load_text_encoder(path, comm.device, sharding)
    size = weight_bytes(encoder)
    embeds = get_qwen3vl_prompt_embeds(encoder.to(dtype), load_processor(path), tokens, {}, 50, comm.device, dtype)
    mine = (size, embeds.float().sum().item())
    told = [mine] * comm.world_size
    if comm.world_size > 1:
        torch.distributed.all_gather_object(told, mine, group=comm.world)
    return Embedded(embeds.float(), [each[0] for each in told], len({each[1] for each in told}) == 1)
