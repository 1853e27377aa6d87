"""A Ray cluster of two nodes on this machine, for tests: in a process of its own, so that Ray stays out of pytest.

By default each node has one CPU, so that a group of two CPU ranks needs both. The first has two GPUs, which are only
numbers.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STORE_BYTES = 80 * 2**20


class RayCluster:
    """The test's handle on the cluster process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = str(self._answer())
        """What `RAY_ADDRESS` has to be."""

    def raylets(self) -> list[int]:
        """Process ids of the nodes: whatever runs on a node descends from its raylet."""
        return list(self._ask("raylets"))

    def kill_second_node(self) -> None:
        """As a host that fails: nobody is told."""
        self._ask("kill")

    def add_second_node(self) -> None:
        """Another one in its place."""
        self._ask("add")

    def _ask(self, word: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the Ray cluster ended with {self._process.wait()}")


@contextmanager
def ray_cluster(cpus: tuple[int, int] = (1, 1)) -> Iterator[RayCluster]:
    """Two nodes with so many CPUs; nothing of them is left afterwards, in `/tmp` neither."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie in it, and their paths must be short
    command = [sys.executable, "-m", "tests.ray_cluster", folder, *map(str, cpus)]
    Path(folder, "ray").mkdir()  # where Ray notes the cluster's address; the folder of a machine may not be there yet
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield RayCluster(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
            shutil.rmtree(folder)


def main(folder: str, cpus: tuple[int, int]) -> None:
    """Start the cluster and do what stdin says until it ends."""
    from ray.cluster_utils import Cluster  # only in this process

    shared = {"include_dashboard": False, "object_store_memory": STORE_BYTES, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args={**shared, "num_cpus": cpus[0], "num_gpus": 2})
    node = cluster.add_node(**shared, num_cpus=cpus[1])
    answer(cluster.address)
    for line in sys.stdin:
        match line.strip():
            case "raylets":
                answer([each.all_processes["raylet"][0].process.pid for each in (cluster.head_node, node)])
            case "kill":
                cluster.remove_node(node, allow_graceful=False)
                answer(None)
            case "add":
                node = cluster.add_node(**shared, num_cpus=cpus[1])
                answer(None)
    cluster.shutdown()


def answer(value: object) -> None:
    """One line that is no noise of Ray's."""
    sys.stdout.write(f"answer {json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], (int(sys.argv[2]), int(sys.argv[3])))
