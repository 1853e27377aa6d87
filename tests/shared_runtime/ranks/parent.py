"""Stands for an API process that is killed: `python -m tests.shared_runtime.ranks.parent mp` prints its ranks' pids."""

import asyncio
import sys
from typing import get_args

from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.makers import Backend
from shared_runtime.ranks.mesh import Mesh, rank_specs
from tests.shared_runtime.ranks.bare import Bare

BARE = "tests.shared_runtime.ranks.bare:main"


async def main(backend: Backend) -> None:
    limits = GroupLimits(stuck_s=60, dead_s=60, load_s=60)
    group = ProcessGroup(rank_specs("bare", Mesh(tp=2), ("cpu", "cpu")), BARE, Bare(), limits, backend)

    async def tell() -> None:
        sys.stdout.write(" ".join(str(rank.pid) for rank in group.health()) + "\n")
        sys.stdout.flush()

    await group.supervise(tell)


if __name__ == "__main__":
    asyncio.run(main(next(each for each in get_args(Backend) if each == sys.argv[1])))
