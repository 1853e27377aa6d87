"""Health and metrics of the diffusion service. Runs in the API process."""

import logging

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from diffusion_service.api.deps import ApiDeps, HealthSource
from diffusion_service.api.schema import NOT_READY, TEXT
from shared_runtime.metrics import CONTENT_TYPE, exposition
from shared_schema.errors import StorageUnavailable, StoreUnavailable
from shared_schema.health import Health

_LOG = logging.getLogger(__name__)


def health_router(deps: ApiDeps) -> APIRouter:
    """`/livez`, `/readyz`, `/readyz/api`, `/health` and `/metrics`."""
    router = APIRouter(tags=["health"])

    @router.get("/livez")
    async def live() -> Response:
        """The process answers."""
        return JSONResponse({"status": "alive"})

    @router.get("/readyz", response_model=Health, responses=NOT_READY)
    async def ready() -> Response:
        """Weights, ranks and the way from an encoder are ready; else 503 with the reasons."""
        return _answer(overall(deps.health))

    @router.get("/health", response_model=Health, responses=NOT_READY)
    async def health() -> Response:
        """The same in vLLM-Omni's form."""
        return _answer(overall(deps.health))

    @router.get("/readyz/api", response_model=Health, responses=NOT_READY)
    async def api_ready() -> Response:
        """Store and disk work: jobs can be queued, whatever ranks and encoder do."""
        return _answer(await _api(deps))

    @router.get("/metrics", response_class=Response, responses=TEXT)
    async def metrics() -> Response:
        """Every metric; the names are in docs/metrics.md."""
        return Response(exposition(deps.registry), media_type=CONTENT_TYPE)

    return router


def _answer(report: Health) -> Response:
    status = 200 if report.status == "healthy" else 503
    return JSONResponse(report.model_dump(mode="json"), status_code=status)


def overall(health: HealthSource) -> Health:
    """What `/readyz` says: a service that drains is not ready."""
    report = health.report()
    if not health.draining:
        return report
    reasons = "; ".join(reason for reason in ("draining", report.reason) if reason)
    return report.model_copy(update={"status": "unhealthy", "reason": reasons})


async def _api(deps: ApiDeps) -> Health:
    try:
        await deps.store.get("")
        await run_in_threadpool(deps.artifacts.check)
    except (StoreUnavailable, StorageUnavailable, OSError) as error:
        _LOG.warning("store or disk does not work: %s", error)
        return Health(status="unhealthy", reason="the store or the state folder does not work")
    return Health(status="healthy")
