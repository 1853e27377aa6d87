"""The cells of `benchmarks.topologies` with both services: whole jobs through `/v1/videos`, and ranks that are killed.

The encoder's two ranks share their GPUs with the first two of the DiT's: four GPUs are enough for the preset of six.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from benchmarks.served import ServedRun, run_job, take
from benchmarks.topology_cells import PROMPT, Plan, Tell
from shared_runtime.gpu_memory import Driver
from shared_runtime.gpus import installed_gpus
from shared_schema.videos import FINAL
from tests.end_to_end.clips import Clip, Medium, form
from video_client.pair import Pair, PairSettings, free_ports
from video_client.samples import make_samples

READY_S = 200.0
POLL_S = 0.02
TURBO_POINTS, FULL_POINTS = 5, 50
EMPTY_BYTES = 2 * 2**30
"""A GPU with less in use holds nobody's weights."""
Job = dict[str, Any]


async def shm(plan: Plan, tell: Tell) -> None:
    """Turbo's four forwards and the full 49, through shared memory."""
    with _pair(plan, "shm", tell) as client:
        clip = _clip(plan, "t2va", TURBO_POINTS)
        _served(client, plan, clip, "shm, t2va, 4 forwards", tell, repeats=3)
        _served(client, plan, _with_pictures(clip), "shm, fl2va, 4 forwards", tell, repeats=2)
        points = 8 if plan.tiny else FULL_POINTS
        _served(client, plan, _clip(plan, "t2va", points), f"shm, t2va, {points - 1} forwards", tell, repeats=1)


async def nixl(plan: Plan, tell: Tell) -> None:
    """Turbo's four forwards over NIXL."""
    with _pair(plan, "nixl", tell) as client:
        _served(client, plan, _clip(plan, "t2va", TURBO_POINTS), "nixl, t2va, 4 forwards", tell, repeats=2)


async def faults(plan: Plan, tell: Tell) -> None:
    """A rank killed while it denoises, twice in one job, and while it decodes, once."""
    with _pair(plan, "faults", tell) as client:
        clip = _clip(plan, "t2va", 12)
        _served(client, plan, _clip(plan, "t2va", TURBO_POINTS), "before", tell, repeats=1)
        job = _post(client, clip)
        for attempt in (1, 2):
            tell(f"SIGKILL in denoise, attempt {attempt}", _kill_in(client, plan, job, "denoising"))
        tell("job after two kills", _end_of(client, job))
        _served(client, plan, _clip(plan, "t2va", TURBO_POINTS), "after", tell, repeats=1)
        job = _post(client, clip)
        tell("SIGKILL in decode", _kill_in(client, plan, job, "decoding"))
        tell("job after one kill", _end_of(client, job))


@contextmanager
def _pair(plan: Plan, name: str, tell: Tell) -> Iterator[httpx.Client]:
    """Both services, ready; what they logged goes to our own log at the end."""
    encoder_port, diffusion_port = free_ports(2)
    folder = plan.scratch / name
    make_samples(folder)
    nixl_ = "_nixl" if name == "nixl" else ""
    deploy = "tiny_parallel" if plan.tiny else f"minimax_h3_disaggregated{nixl_}"
    settings = PairSettings(
        model="tiny" if plan.tiny else str(plan.folder),
        deploy_config=deploy,
        encoder_port=encoder_port,
        diffusion_port=diffusion_port,
        state_dir=folder / "state",
        overrides=None if plan.tiny else overrides(plan.devices),
        log_dir=folder / "logs",
    )
    begun = time.monotonic()
    pair = Pair(settings)
    try:
        with pair:
            for package in ("encoder_service", "diffusion_service"):
                print(json.dumps({"process": pair.pid(package)}), flush=True)
            pair.wait_ready(READY_S)
            tell(f"{name}: ready", {"ready_s": round(time.monotonic() - begun, 1)})
            with httpx.Client(base_url=settings.diffusion_url, timeout=600) as client:
                yield client
    finally:
        print(pair.tails(), file=sys.stderr, flush=True)


def overrides(devices: int) -> str:
    """The preset on so few GPUs: both stages on the same ones, weights made up."""
    ranks = {count: ",".join(map(str, range(count))) for count in (min(2, devices), devices)}
    shared = {"share_devices": True, "load_format": "dummy"}
    encoder = {**shared, "devices": ranks[min(2, devices)], "tensor_parallel_size": min(2, devices)}
    degrees = {"tensor_parallel_size": 1, "ulysses_degree": devices, "vae_patch_parallel_size": devices}
    return json.dumps({"0": encoder, "1": {**shared, "devices": ranks[devices], "parallel_config": degrees}})


def _clip(plan: Plan, task: str, points: int) -> Clip:
    height, width = plan.size
    frames = 107 if plan.tiny else 124
    clip = Clip(f"{points} points", "t2va", PROMPT, height=height, width=width, num_frames=frames)
    return replace(clip, num_inference_steps=points, flow_shift=6.0)


def _with_pictures(clip: Clip) -> Clip:
    picture = "picture.png"
    return replace(clip, task="fl2va", media=(Medium(picture, role="first"), Medium(picture, role="last")))


def _served(client: httpx.Client, plan: Plan, clip: Clip, name: str, tell: Tell, *, repeats: int) -> None:
    """Whole jobs, told after each: seconds from POST to the last byte of the file."""
    folder = plan.scratch / "made"
    make_samples(folder)
    runs: list[ServedRun] = []
    for number in range(repeats):
        fresh = take(clip, f"{number} of {name}")
        runs.append(run_job(client, fresh.fields(), fresh.parts(folder), folder / "served.mp4"))
        best = min(runs, key=lambda run: run.total_s)
        stages = {stage: round(seconds, 3) for stage, seconds in best.stages_s.items()}
        tell(
            name,
            {
                "s": round(best.total_s, 3),
                "all_s": [round(run.total_s, 3) for run in runs],
                "forwards": best.forwards,
                "stages_s": stages,
                "residual_s": round(best.residual_s, 3),
                "peak_memory_mb": best.peak_memory_mb,
            },
        )


# Faults


def _post(client: httpx.Client, clip: Clip) -> Job:
    answer = client.post("/v1/videos", files=form(clip.fields(), []))
    answer.raise_for_status()
    made: Job = answer.json()
    return made


def _kill_in(client: httpx.Client, plan: Plan, job: Job, phase: str) -> dict[str, Any]:
    """Kill the last rank while the job is in `phase`; seconds until all that follows."""
    _until(lambda: _busy_in(client, job, phase), f"{job['id']} in {phase}")
    victim = client.get("/health").json()["ranks"][-1]
    memory = _Lowest(plan)
    attempt = _video(client, job)["attempt"]
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.monotonic()
    _until(lambda: client.get("/readyz").status_code != 200, "not ready")
    noticed = time.monotonic() - killed
    _until(lambda: _over(client, job) or _video(client, job)["attempt"] > attempt or _waits(client, job), "its end")
    told = time.monotonic() - killed
    _until(lambda: client.get("/readyz").status_code == 200, "ready again")
    figures = {
        "rank": victim["name"],
        "unready_s": round(noticed, 3),
        "job_told_s": round(told, 3),
        "ready_s": round(time.monotonic() - killed, 2),
    }
    return {**figures, **memory.close()}


def _busy_in(client: httpx.Client, job: Job, phase: str) -> bool:
    video = _video(client, job)
    if video["status"] in FINAL:
        raise RuntimeError(f"{job['id']} is {video['status']} before it was seen in {phase}: {video['error']}")
    return video["phase"] == phase and (phase != "denoising" or (video["step"] or 0) >= 1)


def _waits(client: httpx.Client, job: Job) -> bool:
    return bool(_video(client, job)["status"] == "queued")


def _over(client: httpx.Client, job: Job) -> bool:
    return _video(client, job)["status"] not in ("queued", "in_progress")


def _end_of(client: httpx.Client, job: Job) -> dict[str, Any]:
    begun = time.monotonic()
    _until(lambda: _over(client, job), "its end")
    video = _video(client, job)
    error = video["error"] or {}
    return {
        "status": video["status"],
        "code": error.get("code"),
        "message": error.get("message"),
        "attempts": video["attempt"],
        "waited_s": round(time.monotonic() - begun, 2),
    }


def _video(client: httpx.Client, job: Job) -> Job:
    video: Job = client.get(f"/v1/videos/{job['id']}").json()
    return video


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {READY_S:g} s: {what}")
        time.sleep(POLL_S)


class _Lowest:
    """The least memory in use of every GPU since it was made, in GiB. GPUs that the encoder shares keep its weights."""

    def __init__(self, plan: Plan) -> None:
        gpus = () if plan.tiny else installed_gpus()[: plan.devices]
        self._driver = Driver(gpus) if gpus else None
        self._order = [gpu.uuid for gpu in gpus]
        self._lowest: dict[str, int] = {}
        self._empty_s: float | None = None
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._driver is not None and not self._over.wait(POLL_S):
            for uuid, memory in self._driver().items():
                self._lowest[uuid] = min(memory.used, self._lowest.get(uuid, memory.used))
            own = [self._lowest[uuid] for uuid in self._order[2:]]
            if own and max(own) < EMPTY_BYTES and self._empty_s is None:
                self._empty_s = time.monotonic() - self._begun

    def close(self) -> dict[str, Any]:
        """What it saw."""
        self._over.set()
        self._thread.join()
        if self._driver is None:
            return {}
        lowest = [round(self._lowest[uuid] / 2**30, 2) for uuid in self._order]
        return {"lowest_gib": lowest, "empty_s": None if self._empty_s is None else round(self._empty_s, 2)}
