"""The diffusion's ranks with gates: what the forker of a service under test imports."""

import errno
import os
import socket
import time
from pathlib import Path

import diffusion_service.sampling.generate
from diffusion_service.mux import ClipWriter
from diffusion_service.worker import build
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.worker import Beater, rank_main
from tests.faults.gated import GATES, HeldRank


class HeldWriter(ClipWriter):
    """Completes its file once the gate `muxing` is open, and finds the disk full if `muxing.full-0` is there."""

    def _complete(self) -> None:
        folder = Path(os.environ[GATES])
        (folder / "muxing.reached-0").touch()
        while (folder / "muxing").exists():
            time.sleep(0.02)
        if (folder / "muxing.full-0").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._complete()


def held(comm: RankComm, settings: object, beater: Beater) -> HeldRank:
    diffusion_service.sampling.generate.ClipWriter = HeldWriter  # type: ignore[misc]
    return HeldRank(build(comm, settings, beater), comm)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    rank_main(held, spec, settings, end)
