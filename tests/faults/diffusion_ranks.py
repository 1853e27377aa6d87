"""The diffusion's ranks with gates: what the forker of a service under test imports."""

import socket

from diffusion_service.worker import build
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.worker import Beater, rank_main
from tests.faults.gated import HeldRank


def held(comm: RankComm, settings: object, beater: Beater) -> HeldRank:
    return HeldRank(build(comm, settings, beater), comm)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    rank_main(held, spec, settings, end)
