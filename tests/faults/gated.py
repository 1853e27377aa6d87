"""Gates in the ranks of a service under test; see `tests.faults.held`. Runs in ranks."""

import os
import time
from pathlib import Path

import torch

from diffusion_service.commands import ChunkDone, StepDone
from encoder_service.commands import Encode, Push
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.worker import RankService, TaskHandle

GATES = "FAULT_GATES"


class Gates:
    """The gates of one rank."""

    def __init__(self, comm: RankComm) -> None:
        self._comm = comm
        self._folder = Path(os.environ[GATES])

    def pass_(self, phase: str, task: TaskHandle) -> None:
        """Wait, raise or spin as the folder says; otherwise go on."""
        rank = self._comm.spec.rank
        (self._folder / f"{phase}.reached-{rank}").touch()
        if (self._folder / f"{phase}.raise-{rank}").exists():
            raise ZeroDivisionError(f"raised in {phase} on rank {rank}")
        if (self._folder / f"{phase}.memory-{rank}").exists():
            raise torch.OutOfMemoryError(f"no memory in {phase} on rank {rank}")
        while (self._folder / f"{phase}.spin-{rank}").exists():
            pass
        if task.lane == "side":
            while (self._folder / phase).exists():
                time.sleep(0.02)
            return
        while self._comm.any((self._folder / phase).exists()):
            time.sleep(0.02)
            task.go_on()


class HeldRank:
    """A service's rank with gates around what it does."""

    def __init__(self, service: RankService, comm: RankComm) -> None:
        self._service = service
        self._gates = Gates(comm)

    @property
    def facts(self) -> object:
        return self._service.facts

    def handle(self, command: object, task: TaskHandle) -> object:
        match command:
            case Encode():
                self._gates.pass_("encoding", task)
            case Push():
                self._gates.pass_("pushing", task)
        task.report = self._reporting(task)  # type: ignore[method-assign]
        result = self._service.handle(command, task)
        if isinstance(command, Encode):
            self._gates.pass_("encoded", task)
        return result

    def _reporting(self, task: TaskHandle):  # type: ignore[no-untyped-def]
        report = task.report

        def passing(event: object) -> None:
            report(event)
            match event:
                case StepDone(done=1):
                    self._gates.pass_("denoising", task)
                case ChunkDone(1, _):
                    self._gates.pass_("decoding", task)

        return passing
