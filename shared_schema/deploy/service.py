"""The `service:` block of a deploy file, each key declared once, with its default. Pure."""

from pathlib import Path

from pydantic import PositiveFloat, PositiveInt, SecretStr

from shared_schema.deploy.values import Settings
from shared_schema.tasks import MediaCaps


class ServiceSettings(Settings):
    """What a service does around its rank group. Times in seconds, sizes in bytes, unless the name says otherwise."""

    queue_limit: PositiveInt = 1000
    """Queued jobs; the next POST is a 429."""
    sync_timeout_s: PositiveFloat = 600
    retention_hours: PositiveFloat = 168
    drain_s: PositiveFloat = 30
    """From TERM to exit, for what is running."""
    accept_when_not_ready: bool = True
    """Whether POST queues while encoder or ranks are away."""
    media_caps: MediaCaps = MediaCaps()
    slab_folder: Path = Path("/dev/shm/minimax-h3")
    slab_bytes: PositiveInt = 2 * 2**30
    lease_s: PositiveFloat = 60
    """How long a landing, and an encoding that waits for its push, stay without renewal."""
    encode_timeout_s: PositiveFloat = 600
    stuck_s: PositiveFloat = 60
    """A rank that lives and has not worked for this long is stuck."""
    dead_s: PositiveFloat = 10
    """A rank that is gone is found within this time."""
    load_s: PositiveFloat = 1800
    """Loading, compile and warm-up of a rank group."""
    internal_token: SecretStr | None = None
    """Shared by both services; needed to listen on another address than loopback."""
    internal_token_file: Path | None = None
    """Instead of `internal_token`: a file that holds it."""
