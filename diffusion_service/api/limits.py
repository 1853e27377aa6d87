"""What this server accepts, as plain data: built once by the app, read by every check. Runs in the API process."""

from dataclasses import dataclass, field

from diffusion_service.adapters.adapter import Adapter
from shared_schema.deploy.service import AllowedHost
from shared_schema.lora import Contract
from shared_schema.tasks import CanvasLimits, MediaCaps, ReferenceLimits, Task

MIB = 2**20


@dataclass(frozen=True)
class BodyCaps:
    """Bytes and counts of one request's body, whatever its content type."""

    body_bytes: int = 512 * MIB
    """All bytes but those of an `encoder_output`: nine images and three videos at their own caps fit."""
    text_bytes: int = 2 * MIB
    """All text of a request together, long `data:` URLs not counted: they go to disk as they arrive."""
    encoder_output_bytes: int = 1024 * MIB
    files: int = 32
    fields: int = 256


@dataclass(frozen=True)
class RequestDefaults:
    """What a request gets where it says nothing, from deploy file and checkpoint."""

    seed: int
    num_inference_steps: int
    """Sigma points."""
    flow_shift: float
    audio_flow_shift: float


@dataclass(frozen=True)
class StartupAdapter:
    """The adapter that this server was started with: every request gets it."""

    adapter: Adapter
    contract: Contract


@dataclass(frozen=True)
class ServerLimits:
    """Everything that decides whether a request is accepted, besides the request. Values come from deploy file and
    checkpoint; only what no file sets has a default here.
    """

    served_names: tuple[str, ...]
    """The first one is what a job reports."""
    text_dim: int
    canvas: CanvasLimits
    defaults: RequestDefaults
    tasks: frozenset[Task]
    queue_limit: int
    jobs_per_key: int | None
    """Unfinished jobs of one key; None: no limit of its own."""
    sync_timeout_s: float
    retention_s: float
    accept_when_not_ready: bool
    references: ReferenceLimits = field(default_factory=ReferenceLimits)
    caps: MediaCaps = field(default_factory=MediaCaps)
    body: BodyCaps = field(default_factory=BodyCaps)
    webhook_hosts: tuple[AllowedHost, ...] = ()
    """Hosts that a `webhook_url` may name; none: webhooks are off."""
    takes_encoder_output: bool = True
    """Not in the text-only split: there a payload holds no media, and the ranks encode those of the request."""
    redirect_s: float | None = None
    """Clips in an object store are answered with a URL that is good for that long; None: read through."""
    landing_bytes: int | None = None
    """The largest payload that the slab can hold. None: any."""
    lora: StartupAdapter | None = None
    takes_lora: bool = False
    """Whether a request may choose an adapter."""
    poll_after_ms: int = 1000
    """Asked of clients that poll a job."""
