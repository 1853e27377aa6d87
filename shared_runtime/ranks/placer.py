"""Puts the followers of a rank group on a Ray cluster. Runs as `python -m shared_runtime.ranks.placer`; no torch.

A child of the API process, and a driver of the cluster: nothing of Ray is in the API process. It gets the requests and
tells the news of a forker, and passes every follower's pipe on to an `Outpost` where Ray found a place, over Ray's own
channel. When it ends, however it ends, Ray ends the outposts, and the ranks die with these.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shared_runtime.ranks.forker import die_with_parent
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import (
    Exited,
    FromMaker,
    Imported,
    KillRank,
    Made,
    MakeRank,
    Place,
    Placed,
    ToMaker,
    Unplaced,
)
from shared_runtime.ranks.outpost import CHUNK_BYTES, Outpost

_MAX_REQUEST = 1 << 20
_ANSWER_S = 2.0
"""An outpost that does not answer for this long when its rank is to be killed is killed itself."""
_SLICE_S = 0.2
_ADVICE = "; start one with `ray start`, or set RAY_ADDRESS"
_NODE_ID = "ray.io/node-id"


class NoPlace(Exception):
    """The cluster is not there, or has no room, or cannot run ranks."""


class Placer:
    """One group's place in a cluster, taken at its first start and kept over restarts until something of it is lost."""

    def __init__(self, control: socket.socket, entry: str) -> None:
        self._control = control
        self._entry = entry
        self._group: PlacementGroup | None = None
        self._outposts: list[Any] = []
        """By rank. The leader's holds its share of this host, and nothing else."""
        self._placed: Placed | None = None
        self._closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def serve(self) -> None:
        """Do what the API process asks for until it closes its end."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._hear)
        self._tell(Imported())
        await self._closed.wait()
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._clear()
        if self._failure is not None:
            raise self._failure

    def _hear(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_REQUEST, 1)
        if not data:
            self._closed.set()
            return
        request: ToMaker = pickle.loads(data)
        match request:
            case Place():
                self._begin(self._place(request))
            case MakeRank():
                self._begin(self._keep(request, socket.socket(fileno=descriptors[0])))
            case KillRank(rank):
                self._begin(self._kill(rank))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A mistake of ours ends this process: whoever waits for an answer must not wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._closed.set()

    def _tell(self, news: FromMaker) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._control.send(pickle.dumps(news))

    # Places

    async def _place(self, request: Place) -> None:
        try:
            if self._placed is None:
                self._clear()
                self._placed = await self._find(request)
            self._tell(self._placed)
        except NoPlace as error:
            self._clear()
            self._tell(Unplaced(str(error)))

    async def _find(self, request: Place) -> Placed:
        await self._join(request.wait_s)
        here = ray.get_runtime_context().get_node_id()
        share = "CPU" if request.specs[0].device == "cpu" else "GPU"
        count = len(request.specs)
        on_this_host: list[dict[str, str]] = [{_NODE_ID: here}, *[{} for _ in request.specs[1:]]]
        self._group = placement_group([{share: 1.0}] * count, strategy="PACK", bundle_label_selector=on_this_host)
        if not await _granted(self._group, request.wait_s):
            raise NoPlace(_no_room(share, count, request.wait_s))
        bundles: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        # Neighbours in the mesh talk most: ranks of one host follow each other, the leader's host first.
        order = sorted(range(count), key=lambda bundle: (bundle != 0, bundles[bundle] != here, bundles[bundle], bundle))
        self._outposts = [self._outpost(self._group, bundle, share) for bundle in order]
        nodes = tuple(bundles[bundle] for bundle in order)
        try:
            await asyncio.gather(*[outpost.open.remote() for outpost in self._outposts[1:]])
            visible = await _visible(self._outposts[0]) if share == "GPU" else None
        except RayError as error:
            raise NoPlace(f"a node of the Ray cluster cannot run ranks: {_last_line(error)}") from error
        host = ray.util.get_node_ip_address() if set(nodes) != {here} else request.specs[0].host
        specs = tuple(_at(spec, host, visible) for spec in request.specs)
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        return Placed(specs, tuple(addresses[node] for node in nodes))

    async def _join(self, wait_s: float) -> None:
        """Become a driver of the cluster that `RAY_ADDRESS` names, or of the one that this host is part of."""
        if ray.is_initialized():
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(_connect), wait_s)
        except TimeoutError:
            self._tell(Unplaced(f"no Ray cluster to join: none answered within {wait_s:g} s{_ADVICE}"))
            os._exit(1)  # Ray goes on trying, and another process can try anew
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise NoPlace(f"no Ray cluster to join: {_last_line(error)}{_ADVICE}") from error

    def _outpost(self, group: PlacementGroup, bundle: int, share: str) -> Any:
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        amounts = {"num_cpus": float(share == "CPU"), "num_gpus": float(share == "GPU")}
        return ray.remote(Outpost).options(scheduling_strategy=place, max_restarts=0, **amounts).remote(self._entry)

    def _clear(self) -> None:
        """Give every place back, with what is there."""
        self._placed = None
        for outpost in self._outposts:
            ray.kill(outpost)
        self._outposts = []
        if self._group is not None:
            remove_placement_group(self._group)
        self._group = None

    # Ranks

    async def _keep(self, request: MakeRank, pipe: socket.socket) -> None:
        """Make a rank, carry its pipe while it lives, and tell of its end."""
        outpost = self._outposts[request.spec.rank]
        pipe.setblocking(False)
        code = -int(signal.SIGKILL)
        downwards: asyncio.Task[None] | None = None
        with pipe:
            try:
                pid = await outpost.make.remote(request.spec, request.settings)
                self._tell(Made(request.spec.rank, pid))
                downwards = asyncio.create_task(_carry(pipe, outpost))
                while data := await outpost.hear.remote():
                    with contextlib.suppress(ConnectionError):
                        await asyncio.get_running_loop().sock_sendall(pipe, data)
                code = await outpost.exit_code.remote()
            except RayError:
                self._lose(outpost)
            finally:
                # Before the pipe is closed: a loop that still reads it would not hear the next one of that number.
                if downwards is not None:
                    downwards.cancel()
                    await asyncio.wait([downwards])
        self._tell(Exited(request.spec.rank, code))

    async def _kill(self, rank: int) -> None:
        outpost = self._outposts[rank]
        try:
            await asyncio.wait_for(_answer(outpost.kill.remote()), _ANSWER_S)
        except (RayError, TimeoutError):
            self._lose(outpost)

    def _lose(self, outpost: Any) -> None:
        """Have nothing of an outpost that is gone or deaf, and look for places anew next time."""
        self._placed = None
        ray.kill(outpost)


async def _granted(group: PlacementGroup, wait_s: float) -> bool:
    """Whether the cluster made room; asked in slices, so that this process can end meanwhile."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while not await asyncio.to_thread(group.wait, _SLICE_S):
        if asyncio.get_running_loop().time() > deadline:
            return False
    return True


async def _answer(reference: Any) -> Any:
    return await reference


async def _carry(pipe: socket.socket, outpost: Any) -> None:
    """What the API process says to a rank, until one of them ends."""
    with contextlib.suppress(RayError, ConnectionError):
        while data := await asyncio.get_running_loop().sock_recv(pipe, CHUNK_BYTES):
            await outpost.tell.remote(data)
        await outpost.tell.remote(b"")


def _connect() -> None:
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)


def _no_room(share: str, count: int, wait_s: float) -> str:
    found = [
        f"{node['NodeManagerAddress']} with {node['Resources'].get(share, 0):g}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    free = ray.available_resources().get(share, 0)
    return (
        f"the Ray cluster had no room for the rank group within {wait_s:g} s: needed {count} {share}, one of them on "
        f"this host; found {', '.join(found)}, {free:g} of all free"
    )


async def _visible(outpost: Any) -> str:
    """The GPU that Ray gave to an outpost, as `CUDA_VISIBLE_DEVICES` names it."""
    return ",".join(str(each) for each in await outpost.__ray_call__.remote(_gpus))


def _gpus(_outpost: object) -> list[Any]:
    return list(ray.get_gpu_ids())


def _at(spec: RankSpec, host: str, visible: str | None) -> RankSpec:
    """The rank in its place: Ray shows an outpost its own GPU alone, and the leader sees what was taken for it."""
    device = spec.device if spec.device == "cpu" else "0"
    return replace(spec, host=host, device=device, visible=visible if spec.is_leader else None)


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def main(descriptor: int, entry: str) -> None:
    """Serve the API process at the other end of `descriptor`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    os.dup2(2, 1)  # what Ray prints is no output of ours
    asyncio.run(Placer(socket.socket(fileno=descriptor), entry).serve())
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
