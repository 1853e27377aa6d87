"""The public API over a store in memory and a runner that does what the test says: no model, no socket."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from diffusion_service.adapters.catalog import Catalog
from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.disk import DiskGuard
from diffusion_service.api.fakes import FakeHealth, FakeRunner
from diffusion_service.api.fetch import MediaFetcher
from diffusion_service.api.layers import Access, install
from diffusion_service.api.limits import RequestDefaults, ServerLimits
from diffusion_service.api.router import build_router
from diffusion_service.jobs.artifacts import Artifacts
from diffusion_service.jobs.feed import JobFeed
from diffusion_service.jobs.job import Job
from diffusion_service.jobs.memory import MemoryJobStore
from diffusion_service.jobs.shelves.shelf import Shelf
from diffusion_service.outbound import PinnedClient
from shared_runtime.answers import AnswerAccounts
from shared_schema.deploy.service import AllowedHost
from shared_schema.errors import NotReady
from shared_schema.tasks import CanvasLimits, Task

FilePart = tuple[str, tuple[str | None, bytes | str, str]]

LIMITS = ServerLimits(
    served_names=("tiny", "minimax/h3"),
    text_dim=32,
    canvas=CanvasLimits(64, 8192, 64),
    defaults=RequestDefaults(seed=42, num_inference_steps=4, flow_shift=12.0, audio_flow_shift=3.0),
    tasks=frozenset(Task),
    queue_limit=50,
    jobs_per_key=None,
    sync_timeout_s=5.0,
    retention_s=100.0,
    accept_when_not_ready=True,
)
MIXED = ("ref1.png", "vid_24fps.mp4", "aud_stereo_32k.wav")


@dataclass
class Served:
    """One API with everything behind it in reach."""

    folder: Path
    client: httpx.AsyncClient
    store: MemoryJobStore
    artifacts: Artifacts
    runner: FakeRunner
    health: FakeHealth
    app: FastAPI
    feed: JobFeed
    disk: DiskGuard
    counted: list[str] = field(default_factory=list)
    encoder_away: bool = False

    async def count_tokens(self, prompt: str) -> int:
        """Two characters a token."""
        if self.encoder_away:
            raise NotReady("no encoder answers")
        self.counted.append(prompt)
        return len(prompt) // 2

    async def post(
        self, fields: Mapping[str, object], parts: Sequence[FilePart] = (), path: str = "/v1/videos", **headers: str
    ) -> httpx.Response:
        """A multipart request: texts first, then files, in the order given."""
        texts = [(name, (None, str(value), "")) for name, value in fields.items() if value is not None]
        files: Any = [*texts, *parts]
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, files=files, headers=sent)

    async def job(self, answer: httpx.Response) -> Job:
        """The accepted job."""
        assert answer.status_code == 200, answer.text
        job = await self.store.get(answer.json()["id"])
        assert job is not None
        return job

    def files(self) -> list[str]:
        """Everything in the state folder."""
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path) for path in found if path.name != "lock")


@dataclass(frozen=True)
class Around:
    """What stands around the API."""

    access: Access = field(default_factory=Access)
    min_free_bytes: int = 0
    media_hosts: tuple[AllowedHost, ...] = ()
    fetch_s: float = 30
    adapters: Catalog | None = None
    shelf: Shelf | None = None
    """Where clips lie in place of the state folder."""
    redirect_s: float | None = None


PLAIN = Around()


def serve(
    folder: Path, body: Callable[[Served], Awaitable[None]], limits: ServerLimits = LIMITS, around: Around = PLAIN
) -> None:
    """Run `body` against a fresh API; afterwards no upload may be left."""

    async def run() -> None:
        served = _build(folder, limits, around)
        try:
            async with served.client:
                await body(served)
            assert list((folder / "uploads").iterdir()) == []
        finally:
            served.artifacts.close()

    asyncio.run(run())


def live(folder: Path, body: Callable[[Served, int], Awaitable[None]], around: Around = PLAIN) -> None:
    """Run `body` with the port on which the API listens."""

    async def run(served: Served) -> None:
        config = uvicorn.Config(served.app, port=0, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await body(served, server.servers[0].sockets[0].getsockname()[1])
        finally:
            server.should_exit = True
            await serving

    serve(folder, run, around=around)


def _build(folder: Path, limits: ServerLimits, around: Around) -> Served:
    feed = JobFeed()
    store, artifacts, health = MemoryJobStore(tell=feed.tell), Artifacts(folder, around.shelf), FakeHealth()
    runner = FakeRunner(store, artifacts, lambda: 1000.0, limits.retention_s)
    app = FastAPI()
    transport = httpx.ASGITransport(app=app)
    client = httpx.AsyncClient(transport=transport, base_url="http://h3")
    disk = DiskGuard(folder, around.min_free_bytes)
    served = Served(folder, client, store, artifacts, runner, health, app, feed, disk)
    deps = ApiDeps(
        store,
        artifacts,
        runner,
        replace(limits, redirect_s=around.redirect_s),
        health,
        served.count_tokens,
        lambda: 1000.0,
        feed,
        disk,
        model_info={"load_format": "safetensors"},
        fetcher=MediaFetcher(PinnedClient(around.media_hosts), around.media_hosts, around.fetch_s, disk.check)
        if around.media_hosts
        else None,
        adapters=around.adapters,
    )
    install(app, around.access, AnswerAccounts(deps.registry))
    app.include_router(build_router(deps))
    return served


async def until(condition: Callable[[], object]) -> None:
    """Until `condition()` is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def part(path: Path, name: str = "input_references", file_name: str = "a.png") -> FilePart:
    """A file of a form; its name says nothing, as it must."""
    return (name, (file_name, path.read_bytes(), "application/octet-stream"))


def extra(**values: object) -> dict[str, object]:
    """`extra_params` as JSON text."""
    return {"extra_params": json.dumps(values)}


def error(answer: httpx.Response, status: int = 400) -> dict[str, str]:
    """The error of a refused request."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    body: dict[str, str] = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return body
