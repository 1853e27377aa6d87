"""What `/livez`, `/readyz` and `/health` answer, the same shape for both services."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

RankState = Literal["starting", "ready", "busy", "stuck", "dead"]


class RankHealth(BaseModel):
    """One rank as its group sees it."""

    model_config = ConfigDict(frozen=True)

    name: str
    """Process name, as `ps` shows it: `encoder-tp0`, `diffusion-u3`."""
    pid: int
    state: RankState
    beat_age_s: float
    """Seconds since the rank last proved that it works."""
    device: str
    weight_bytes: int | None = None
    """What it holds of the weights on its device, at most, measured; None until it is ready."""
    offloaded_bytes: int | None = None
    """What waits in its host memory for a turn on the device; None until it is ready."""
    load_format: str | None = None
    """Where its weights came from: `safetensors`, or `dummy` for made-up ones; None until it is ready."""


class Health(BaseModel):
    """`/health`, in vLLM-Omni's form plus details; `/readyz` is the same with its status code."""

    model_config = ConfigDict(frozen=True)

    status: Literal["healthy", "unhealthy"]
    reason: str | None = None
    """All reasons, joined; None when healthy."""
    ranks: tuple[RankHealth, ...] = ()
    restarts: int = 0
    """How often the rank group was started anew."""
    lora: str | None = None
    """The adapter that every job of a diffusion service gets."""
