"""What this server serves and accepts: `/v1/models` and `/v1/limits`. Runs in the API process."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffusion_service.api.deps import ApiDeps
from diffusion_service.api.limits import ServerLimits
from diffusion_service.api.lora import shown
from diffusion_service.api.schema import parameter
from shared_schema.errors import NotFound
from shared_schema.quality import PROFILES
from shared_schema.tasks import (
    ASPECT_RATIOS,
    CANVAS_MULTIPLE,
    DEFAULT_FRAMES,
    FPS,
    MAX_ASPECT,
    MAX_FRAMES,
    MAX_PROMPT_TOKENS,
    MAX_SECONDS,
    MAX_SIGMA_POINTS,
    MIN_FRAMES,
    MIN_SECONDS,
    MIN_SIGMA_POINTS,
    CanvasLimits,
    canvas_for_ratio,
    is_aligned,
    min_side,
)
from shared_schema.videos import MAX_OUTPUTS

MODEL_NAME = parameter("name", {"type": "string"}, "A name under which this server serves its model.", "path")


def about_router(deps: ApiDeps) -> APIRouter:
    """Models and limits; nothing changes while the process lives, but for what ranks hold once they have loaded."""
    router = APIRouter(prefix="/v1", tags=["about"])

    @router.get("/models")
    async def models() -> Response:
        """Every name under which this server serves its model."""
        data = [_model(name, deps) for name in deps.limits.served_names]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/models/{name:path}", openapi_extra={"parameters": [MODEL_NAME]})
    async def model(request: Request) -> Response:
        """One served name."""
        name = request.path_params["name"]
        if name not in deps.limits.served_names:
            raise NotFound(f"there is no model {name[:200]!a}", param="model")
        return JSONResponse(_model(name, deps))

    @router.get("/limits")
    async def limits() -> Response:
        """Sizes, lengths, counts and bytes that a request may have."""
        return JSONResponse(describe(deps.limits))

    return router


def _model(name: str, deps: ApiDeps) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "minimax-h3",
        **deps.model_info,
        "memory": _memory(deps),
    }


def _memory(deps: ApiDeps) -> dict[str, dict[str, int | None]]:
    """Bytes of weights by rank: on its device at most, and in host memory for their turn; null until it has loaded."""
    return {
        rank.name: {"resident_bytes": rank.weight_bytes, "offloaded_bytes": rank.offloaded_bytes}
        for rank in deps.health.report().ranks
    }


def describe(limits: ServerLimits) -> dict[str, object]:
    """The limits for pages and clients; units are in the names."""
    defaults = limits.defaults
    return {
        "object": "limits",
        "models": list(limits.served_names),
        "tasks": sorted(limits.tasks),
        "size": _sizes(limits.canvas),
        "length": _lengths(),
        "num_inference_steps": _steps(limits),
        "defaults": {
            "seed": defaults.seed,
            "flow_shift": defaults.flow_shift,
            "audio_flow_shift": defaults.audio_flow_shift,
        },
        "qualities": {name: profile and profile.model_dump() for name, profile in PROFILES.items()},
        "lora": shown(limits.lora),
        "lora_by_request": limits.takes_lora,
        "prompt": {"max_tokens": MAX_PROMPT_TOKENS},
        "references": _references(limits),
        "bytes": _bytes(limits),
        "max_image_pixels": limits.caps.image_pixels,
        "max_outputs": MAX_OUTPUTS,
        "queue_limit": limits.queue_limit,
        "webhooks": bool(limits.webhook_hosts),
        "sync_timeout_seconds": limits.sync_timeout_s,
        "retention_seconds": limits.retention_s,
    }


def _sizes(canvas: CanvasLimits) -> dict[str, object]:
    named = {name: ratio for name, ratio in ASPECT_RATIOS.items() if ":" in name}
    return {
        "by_aspect_ratio": {name: str(canvas_for_ratio(*ratio, canvas)) for name, ratio in named.items()},
        "multiple_px": CANVAS_MULTIPLE,
        "short_edge_px": canvas.short_edge,
        "max_pixels": canvas.max_pixels,
        "max_aspect": MAX_ASPECT,
    }


def _lengths() -> dict[str, object]:
    return {
        "fps": FPS,
        "min_seconds": MIN_SECONDS,
        "max_seconds": MAX_SECONDS,
        "num_frames": [frames for frames in range(MIN_FRAMES, MAX_FRAMES + 1) if is_aligned(frames)],
        "default_num_frames": DEFAULT_FRAMES,
    }


def _steps(limits: ServerLimits) -> dict[str, int]:
    """Sigma points; an adapter leaves one number of them."""
    default = limits.defaults.num_inference_steps
    least, most = (MIN_SIGMA_POINTS, MAX_SIGMA_POINTS) if limits.lora is None else (default, default)
    return {"min": least, "max": most, "default": default}


def _bytes(limits: ServerLimits) -> dict[str, int]:
    caps, body = limits.caps, limits.body
    return {
        "max_image": caps.image_bytes,
        "max_video": caps.video_bytes,
        "max_audio": caps.audio_bytes,
        "max_body": body.body_bytes,
        "max_encoder_output": body.encoder_output_bytes if limits.takes_encoder_output else 0,
    }


def _references(limits: ServerLimits) -> dict[str, object]:
    references = limits.references
    return {
        "max_images": references.images,
        "max_videos": references.videos,
        "max_audios": references.audios,
        "max_total": references.total,
        "min_seconds": references.min_seconds,
        "max_seconds": references.max_seconds,
        "min_fps": references.min_fps,
        "max_fps": references.max_fps,
        "min_side_px": min_side(limits.canvas),
        "max_side_px": limits.caps.max_side,
        "max_aspect": references.max_aspect,
        "max_keyframe_aspect": MAX_ASPECT,
        "image_short_edge_px": limits.canvas.reference_short_edge,
        "tolerance_seconds": references.audio_tolerance_seconds,
    }
