"""Two diffusion services side by side, one that keeps ten finished jobs and one that keeps ten thousand.

The limit of the project: a list and a GET take at most `RATIO` times as long with ten thousand.
"""

import asyncio
import itertools
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx

from benchmarks.figures import percentile
from diffusion_service.jobs.job import ClipResult, Job, VideoPlan
from diffusion_service.jobs.sql.store import SqlJobStore
from shared_schema.tasks import Task
from shared_schema.videos import Execution, VideoOutput
from video_client.pair import free_ports

RATIO = 1.5
READY_S = 120.0
KEPT_S = 7 * 24 * 3600.0
_PLAN = VideoPlan(
    model="tiny",
    task=Task.T2VA,
    prompt="a red ball rolls over grass",
    height=64,
    width=64,
    num_frames=107,
    num_inference_steps=50,
    flow_shift=12.0,
    audio_flow_shift=3.0,
    seed=1,
)


def fill(state: Path, count: int) -> list[str]:
    """Keep `count` completed jobs in the state folder of a service that does not run; their ids."""
    state.mkdir(parents=True)
    return asyncio.run(_fill(state, count))


async def _fill(state: Path, count: int) -> list[str]:
    store = SqlJobStore(f"sqlite:///{state / 'jobs.sqlite3'}")
    output = VideoOutput(index=0, seed=1, frames_sha256="0" * 64, audio_sha256="0" * 64, bytes=1)
    execution = Execution(
        device="cpu", torch="0", tp=1, ulysses=1, precision="bf16", attention="sdpa", load_format="safetensors"
    )
    result = ClipResult(outputs=(output,), stage_durations={"denoise": 1.0, "decode": 1.0}, execution=execution)
    ids = [f"video_{secrets.token_hex(16)}" for _ in range(count)]
    now = time.time()
    try:
        for job_id in ids:
            job = Job(id=job_id, sequence=0, plan=_PLAN, created_at=now).start(now).complete(result, now, KEPT_S)
            await store.add(job, count)
    finally:
        await store.close()
    return ids


@contextmanager
def service(state: Path, log: Path) -> Iterator[httpx.Client]:
    """A diffusion service without an encoder, once its API answers."""
    port, nobody = free_ports(2)
    command = [sys.executable, "-m", "diffusion_service", "--model", "tiny", "--deploy-config", "tiny"]
    command += ["--port", str(port), "--encoder-url", f"http://127.0.0.1:{nobody}", "--state-dir", str(state)]
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        try:
            _wait_until_ranks_rest(client)
            yield client
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ranks_rest(client: httpx.Client) -> None:
    """Loading would disturb what is measured."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            ranks = client.get("/health").json()["ranks"]
            if ranks and all(rank["state"] == "ready" for rank in ranks):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"no service after {READY_S:g} s")


def measure(folder: Path, few: int, many: int, repeat: int) -> dict[str, object]:
    """Ask both services the same in turn, `repeat` times each."""
    sides = {"few": fill(folder / "few", few), "many": fill(folder / "many", many)}
    seconds: dict[str, dict[str, list[float]]] = {"get": {}, "list": {}, "list_after": {}}
    with ExitStack() as stack:
        clients = {name: stack.enter_context(service(folder / name, folder / f"{name}.log")) for name in sides}
        for n, (name, ids) in itertools.product(range(repeat + 20), sides.items()):
            for what, ask in _questions(clients[name], ids).items():
                took = _timed(ask)
                if n >= 20:
                    seconds[what].setdefault(name, []).append(took)
    figures: dict[str, object] = {"few_jobs": few, "many_jobs": many}
    ratios = {}
    for what, by_side in seconds.items():
        for name, values in by_side.items():
            figures[f"{what}_{name}_median_ms"] = round(median(values) * 1e3, 3)
            figures[f"{what}_{name}_p99_ms"] = round(percentile(values, 0.99) * 1e3, 3)
        ratios[f"{what}_ratio"] = round(median(by_side["many"]) / median(by_side["few"]), 3)
    return {**figures, **ratios, "limit": RATIO, "within_limits": max(ratios.values()) <= RATIO}


def _questions(client: httpx.Client, ids: list[str]) -> dict[str, Callable[[], httpx.Response]]:
    job = random.choice(ids)
    # The same number of jobs on either side, from the middle of what is kept.
    after = ids[len(ids) // 2 - 1]
    return {
        "get": lambda: client.get(f"/v1/videos/{job}"),
        "list": lambda: client.get("/v1/videos", params={"limit": 10}),
        "list_after": lambda: client.get("/v1/videos", params={"limit": 5, "after": after, "order": "asc"}),
    }


def _timed(ask: Callable[[], httpx.Response]) -> float:
    begun = time.perf_counter()
    ask().raise_for_status()
    return time.perf_counter() - begun
