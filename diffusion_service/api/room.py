"""Whether a request's payload can ever fit into the slab. Pure; runs in the API process."""

from diffusion_service.api.limits import ServerLimits
from diffusion_service.jobs.job import PlannedReference, VideoPlan
from shared_runtime.transport.sizing import least_payload, picture_rows
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import (
    CANVAS_MULTIPLE,
    FPS,
    FRAMES_PER_CHUNK,
    LATENTS_PER_CHUNK,
    Canvas,
    Task,
    canvas_for_ratio,
)


def check_room(plan: VideoPlan, limits: ServerLimits) -> None:
    """Refuse a request whose payload would be too large for the slab however short its prompt is.

    Raises:
        InvalidRequest: it says the least that the payload has, and the most that the slab holds.
    """
    text_only = not limits.takes_encoder_output
    tokens = rows = 0
    for reference in plan.references:
        seen, encoded = _needs(reference, plan, limits)
        tokens += seen
        rows += 0 if text_only else encoded
    param = "input_references" if plan.references else "prompt"
    check_bytes(least_payload(limits.text_dim, tokens, rows), limits, param)


def check_bytes(needed: int, limits: ServerLimits, param: str) -> None:
    """Refuse a payload of at least `needed` bytes if no landing is as large.

    Raises:
        InvalidRequest: both numbers, and the setting.
    """
    if limits.landing_bytes is not None and needed > limits.landing_bytes:
        raise InvalidRequest(
            f"this request's payload has at least {needed} bytes and this server's slab holds {limits.landing_bytes} "
            "(service.slab_bytes): send fewer or smaller references",
            param=param,
        )


def _needs(reference: PlannedReference, plan: VideoPlan, limits: ServerLimits) -> tuple[int, int]:
    """Vision tokens and visual rows that a reference has at least. Of a video the text encoder may read little."""
    if reference.width is None or reference.height is None:
        return 0, 0
    if plan.task is Task.FL2VA:
        return _rows(plan.canvas), _rows(plan.canvas)
    if reference.kind == "image":
        rows = picture_rows(reference.width, reference.height, limits.canvas)
        return rows, rows
    frames = min(int(max((reference.seconds or 0) - reference.start_seconds, 0) * FPS), plan.num_frames)
    latents = frames // FRAMES_PER_CHUNK * LATENTS_PER_CHUNK
    return 0, latents * _rows(canvas_for_ratio(reference.width, reference.height, limits.canvas))


def _rows(canvas: Canvas) -> int:
    return canvas.height * canvas.width // CANVAS_MULTIPLE**2
