"""Why the diffusion service is ready or not. Runs in its API process."""

from diffusion_service.encoders import Encoders
from diffusion_service.engine import Engine
from shared_schema.health import Health


class ServiceHealth:
    """Ranks and encoders as one report."""

    def __init__(self, engine: Engine, encoders: Encoders, lora: str | None) -> None:
        self._engine = engine
        self._encoders = encoders
        self._lora = lora
        self.draining = False

    def report(self) -> Health:
        """Healthy once ranks and encoder are ready; else every reason."""
        reasons = [] if self._engine.ready else ["the diffusion ranks are not ready"]
        if self._encoders.reason is not None:
            reasons.append(self._encoders.reason)
        return Health(
            status="unhealthy" if reasons else "healthy",
            reason="; ".join(reasons) or None,
            ranks=self._engine.health(),
            restarts=self._engine.restarts,
            lora=self._lora,
        )
