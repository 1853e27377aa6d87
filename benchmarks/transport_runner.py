"""The whole push as the diffusion service's runner sees it, and ranks that read a landing. For `benchmarks.transport`.

The encoder service is the real one, HTTP, queue, rank pipe and leader, only that its rank has no model: it makes up
a payload of the size asked for.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from benchmarks.transport_load import MIB
from benchmarks.transport_rank import RankSettings, Take
from diffusion_service.encoder_client import EncoderClient
from encoder_service.accounts import EncodeAccounts
from encoder_service.encoder import Encoder
from encoder_service.routes import EncoderDeps, build_app
from shared_runtime.ranks.group import GroupLimits, ProcessGroup
from shared_runtime.ranks.mesh import Mesh, rank_specs
from shared_runtime.serving import bind, serve, url_of
from shared_runtime.spans_out import NoSink
from shared_runtime.transport.accounts import TransportAccounts
from shared_runtime.transport.codec import checksum
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from shared_schema.encode import SCHEMA_VERSION, EncodeRequest, EncoderIdentity
from shared_schema.encoder_output import EncoderOutput
from shared_schema.tasks import Task

WARM_UP = 2
RANKS = "benchmarks.transport_rank:main"
LIMITS = GroupLimits(stuck_s=600, dead_s=600, load_s=600)
LEASE_S = 600.0


def measure_runner(mib: list[int], repeats: int) -> list[dict[str, object]]:
    """Milliseconds of each part of a push through a live encoder service, medians, by payload."""
    with tempfile.TemporaryDirectory(prefix="h3bench-", dir="/dev/shm") as folder:
        return asyncio.run(_measure_runner(Path(folder), mib, repeats))


async def _measure_runner(folder: Path, mib: list[int], repeats: int) -> list[dict[str, object]]:
    slab = Slab.create(folder, (max(mib) + 1) * MIB, "benchmark")
    try:
        async with _encoder(folder) as url:
            client = EncoderClient(url, token=None, encode_timeout_s=600)
            try:
                return [await _push_often(client, slab, size, repeats) for size in mib]
            finally:
                await client.close()
    finally:
        slab.close()


async def _push_often(client: EncoderClient, slab: Slab, mib: int, repeats: int) -> dict[str, object]:
    parts = [await _push(client, slab, mib * MIB) for _ in range(repeats + WARM_UP)][WARM_UP:]
    middle = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    return {"runner_mib": mib, **{f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in middle.items()}}


async def _push(client: EncoderClient, slab: Slab, nbytes: int) -> dict[str, float]:
    """What `Handover` does once an encoding is there."""
    request_id = uuid.uuid4().hex
    request = EncodeRequest(
        request_id=request_id, task=Task.T2VA, prompt=str(nbytes), height=768, width=1344, num_frames=124
    )
    encoding = await client.encode(request, ())
    begun = time.perf_counter()
    landing = slab.reserve(encoding.manifest.nbytes, request_id, LEASE_S, time.time())
    receipt = await client.push(encoding, slab.for_sender(landing))
    pushed = time.perf_counter()
    await asyncio.to_thread(slab.verify, landing, receipt.checksum)
    EncoderOutput(manifest=encoding.manifest, data=slab.view(landing))
    proved = time.perf_counter()
    slab.release(landing)
    return {
        "whole": proved - begun,
        "copy": receipt.seconds,
        "control": pushed - begun - receipt.seconds,
        "receiver_checksum": proved - pushed,
    }


@asynccontextmanager
async def _encoder(folder: Path) -> AsyncIterator[str]:
    """An encoder service in processes of its own; its URL."""
    command = [sys.executable, "-m", "benchmarks.transport_runner", str(folder)]
    service = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        assert service.stdout
        yield (await service.stdout.readline()).decode().strip()
    finally:
        service.terminate()
        await service.wait()


async def _serve(folder: Path) -> None:
    group = ProcessGroup(rank_specs("encoder", Mesh(), ("cpu",)), RANKS, RankSettings(folder), LIMITS)
    listener = bind("127.0.0.1", 0)
    registry = CollectorRegistry()
    url = url_of(listener)
    accounts, encodes = TransportAccounts(registry), EncodeAccounts(registry)
    encoder = Encoder(group, endpoint=url, lease_s=LEASE_S, accounts=accounts, encodes=encodes)
    identity = EncoderIdentity(
        schema_version=SCHEMA_VERSION,
        instance_id=encoder.instance_id,
        model="none",
        weights_revision="none",
        text_only=False,
        connector="SharedMemoryConnector",
    )

    async def ready() -> None:
        print(url, flush=True)

    async def drain() -> None:
        group.stop_gently()

    app = build_app(EncoderDeps(encoder, group, identity, None, registry, NoSink().export))
    await serve(app, listener, group.supervise(ready), drain)


def measure_ranks(mib: list[int], repeats: int) -> list[dict[str, object]]:
    """Two CPU ranks: all read the landing, or one reads and broadcasts. Milliseconds until both have it, medians."""
    with tempfile.TemporaryDirectory(prefix="h3bench-", dir="/dev/shm") as folder:
        return asyncio.run(_measure_ranks(Path(folder), mib, repeats))


async def _measure_ranks(folder: Path, mib: list[int], repeats: int) -> list[dict[str, object]]:
    slab, sender = Slab.create(folder, (max(mib) + 1) * MIB, "benchmark"), ShmSender(folder)
    group = ProcessGroup(rank_specs("diffusion", Mesh(tp=2), ("cpu", "cpu")), RANKS, RankSettings(folder), LIMITS)
    supervising = asyncio.create_task(group.supervise())
    try:
        await group.until_ready()
        return [await _take_often(group, slab, sender, size, repeats) for size in mib]
    finally:
        supervising.cancel()
        await asyncio.wait([supervising])
        sender.close()
        slab.close()


async def _take_often(group: ProcessGroup, slab: Slab, sender: ShmSender, mib: int, repeats: int) -> dict[str, object]:
    data = memoryview(bytearray(os.urandom(MIB) * mib))
    landing = slab.reserve(data.nbytes, uuid.uuid4().hex, LEASE_S, time.time())
    slab.verify(landing, sender.push_bytes(landing, data, checksum=checksum(data)).checksum)
    figures: dict[str, object] = {"ranks_mib": mib, "ranks": 2}
    for name, broadcast in (("every_rank_reads", False), ("one_reads_and_broadcasts", True)):
        taken = await group.run(Take(landing, broadcast, repeats + WARM_UP))
        assert isinstance(taken, list)
        figures[f"{name}_ms"] = round(statistics.median(taken[WARM_UP:]) * 1e3, 3)
    slab.release(landing)
    return figures


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
