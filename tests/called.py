"""What the ranks of `tests.ranks` do. Imports torch, and what tests need of it, before they are forked."""

import importlib
import socket
from dataclasses import replace

import torch

from shared_runtime.conditioning.vae_tiles import visual_encoder
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.ranks.worker import Beater, TaskHandle, rank_main
from shared_runtime.weights import load_transformer
from tests.ranks import Call


class CallRank:
    """Does what a test says, without gradients and on one thread."""

    facts = None

    def __init__(self, comm: RankComm) -> None:
        self._comm = comm
        self._splits: dict[Mesh, RankComm | None] = {}
        """Every group of torch costs threads for as long as the process lives."""

    def handle(self, command: object, task: TaskHandle) -> object:
        assert isinstance(command, Call)
        if command.mesh not in self._splits:
            self._splits[command.mesh] = self._comm.split(command.mesh)
        comm = self._splits[command.mesh]
        if comm is None:
            return None
        module, _, name = command.function.partition(":")
        with torch.no_grad():
            return getattr(importlib.import_module(module), name)(comm, replace(task, comm=comm), *command.arguments)


FORKED_WITH = (load_transformer, visual_encoder)
"""Imported before ranks are forked: diffusers and transformers, once for all of them."""


def build(comm: RankComm, _settings: object, _beater: Beater) -> CallRank:
    torch.set_num_threads(1)
    return CallRank(comm)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    rank_main(build, spec, settings, end)
