"""`GET /metrics` of the diffusion service. Runs in the API process."""

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from diffusion_service.api.deps import ApiDeps
from shared_runtime.metrics import CONTENT_TYPE, exposition


def metrics_router(deps: ApiDeps) -> APIRouter:
    """Prometheus' text form of what this process knows; no rank is asked."""
    router = APIRouter(tags=["health"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Every metric; the names are in README.md."""
        return Response(exposition(deps.registry), media_type=CONTENT_TYPE)

    return router
