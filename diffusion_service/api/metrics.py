"""`GET /metrics` of the diffusion service. Runs in the API process."""

from fastapi import APIRouter
from starlette.responses import Response

from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.schema import TEXT
from shared_runtime.metrics import CONTENT_TYPE, exposition


def metrics_router(deps: ApiDeps) -> APIRouter:
    """Prometheus' text form of what this process knows; no rank is asked."""
    router = APIRouter(tags=["health"])

    @router.get("/metrics", response_class=Response, responses=TEXT)
    async def metrics() -> Response:
        """Every metric; the names are in docs/metrics.md."""
        return Response(exposition(deps.registry), media_type=CONTENT_TYPE)

    return router
