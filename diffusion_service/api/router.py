"""All routes of the public API in one router. Runs in the API process."""

from fastapi import APIRouter

from diffusion_service.api.about import about_router
from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.health import health_router
from diffusion_service.api.page import page_router
from diffusion_service.api.schema import ERRORS
from diffusion_service.api.videos import videos_router


def build_router(deps: ApiDeps) -> APIRouter:
    """The API over `deps`; the app that includes it calls `layers.install` too."""
    router = APIRouter()
    for part in (videos_router(deps), about_router(deps), health_router(deps)):
        router.include_router(part, responses=ERRORS)
    router.include_router(page_router())
    return router
