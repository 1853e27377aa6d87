"""The `service:` block of a deploy file, each key declared once, with its default. Pure."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr, model_validator

from shared_schema.deploy.values import Settings
from shared_schema.tasks import MediaCaps

_ORIGIN = r"^(\*|https?://[a-z0-9._:\[\]-]+)$"
_ROOT_PATH = r"^(/[A-Za-z0-9._~-]+)*$"
_SECRET = re.compile("key|secret|token|password", re.IGNORECASE)
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_IPV6 = re.compile(r"[0-9a-f:.]*:[0-9a-f:.]*")


class AllowedHost(Settings):
    """A host that this service may dial. In a file also the name alone."""

    host: str
    """A name, an address, or `*.name` for every name under it; lower case, without scheme and port."""
    private: bool = False
    """Whether it may be of an inner network. Link-local addresses never are dialled."""

    @model_validator(mode="after")
    def _is_a_host(self) -> Self:
        if not (_NAME.fullmatch(self.host) or _IPV6.fullmatch(self.host)):
            raise ValueError("a host is a name or an address in lower case, without scheme and port")
        if self.private and self.host.startswith("*"):
            raise ValueError("a private host is named in full")
        return self

    def covers(self, name: str) -> bool:
        """Whether a host of that name (lower case) is meant."""
        return name.endswith(self.host[1:]) if self.host.startswith("*") else name == self.host


Host = Annotated[AllowedHost, BeforeValidator(lambda given: {"host": given} if isinstance(given, str) else given)]


class WebhookSettings(Settings):
    """Where the end of a job may be told, and how hard that is tried."""

    hosts: tuple[Host, ...] = ()
    """Hosts that a `webhook_url` may name; none: webhooks are off."""
    secret_file: Path | None = None
    """Holds `whsec_` and base64 of 24 to 64 bytes, by which receivers know us; a second line is an older secret."""
    timeout_s: PositiveFloat = 10
    """For the receiver's answer to one try."""
    attempts: PositiveInt = 10
    """Tries of one message, within 10 to 20 hours."""

    @model_validator(mode="after")
    def _can_sign(self) -> Self:
        if self.hosts and self.secret_file is None:
            raise ValueError("hosts needs secret_file, with which messages are signed")
        return self


class StorageSettings(Settings):
    """Where inputs and clips lie when several services share the jobs."""

    url: str | None = None
    """A folder that all services mount, or a URL of fsspec such as s3://bucket/prefix. None: the state folder."""
    options: dict[str, object] = Field(default={})
    """For fsspec's file system of that URL, such as `endpoint_url`. Credentials come from where its client finds them
    by itself, as AWS_ACCESS_KEY_ID or a role of the machine."""
    content: Literal["stream", "redirect"] = "stream"
    """A clip in an object store is read through this service, or answered with a 307 to a signed URL."""
    signed_url_s: PositiveFloat = 3600

    @property
    def folder(self) -> Path | None:
        """The folder that the URL is, if it is one."""
        if self.url is None:
            return None
        path = self.url.removeprefix("file://")
        return Path(path) if path.startswith("/") else None

    @model_validator(mode="after")
    def _holds_no_secret(self) -> Self:
        secrets = {name for name in self.options if _SECRET.search(name)}
        if secrets:
            raise ValueError(f"options: {', '.join(sorted(secrets))} does not belong here: use the client's own ways")
        if self.url is not None and self.folder is None and "://" not in self.url:
            raise ValueError("url is an absolute path, or a URL such as s3://bucket/prefix")
        if self.content == "redirect" and (self.url is None or self.folder is not None):
            raise ValueError("content: redirect needs a url of an object store")
        return self


class ServiceSettings(Settings):
    """What a service does around its rank group. Times in seconds, sizes in bytes, unless the name says otherwise."""

    database: SecretStr | None = None
    """postgresql://user:password@host/name: several diffusion services share its jobs. None: SQLite in the state
    folder."""
    database_file: Path | None = None
    """Instead of `database`: a file that holds it."""
    storage: StorageSettings = StorageSettings()
    queue_limit: PositiveInt = 1000
    """Queued jobs; the next POST is a 429."""
    look_ahead: NonNegativeInt = 2
    """Jobs that are encoded while another one is made. With several encoders at least as many."""
    running_per_key: PositiveInt | None = None
    """Jobs of one key that may be under way at once; None: as many as there is room for."""
    job_timeout_s: PositiveFloat = 7200
    """From `in_progress` to the end of one attempt, all outputs included."""
    job_lease_s: PositiveFloat = 20
    """Of several services on one database, one that is silent for so long loses its jobs to the others."""
    conditioning_cache_bytes: NonNegativeInt = 512 * 2**20
    """Payloads that stay in the slab after use, so that an equal request is not encoded again; a push that needs the
    room takes it. 0: none."""
    keys_file: Path | None = None
    """API keys, as `h3-diffusion keys add` writes them. None: no key is asked for."""
    jobs_per_key: PositiveInt | None = None
    """Jobs of one key that have not ended; the next POST is a 429. None: as many as the queue takes."""
    requests_per_minute: PositiveFloat | None = None
    """Of one key, or of one address where no keys are configured. None: as many as come."""
    request_burst: PositiveInt = 30
    """How many of these may come at once, after a pause."""
    min_free_bytes: NonNegativeInt = 2**30
    """A POST that would leave less on the state folder's disk is a 503."""
    cors_origins: tuple[Annotated[str, Field(pattern=_ORIGIN)], ...] = ()
    """Origins of pages that may call this API: `https://studio.example.com`, or `*`."""
    root_path: str = Field(default="", pattern=_ROOT_PATH)
    """The prefix under which a proxy shows this service."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed."""
    sync_timeout_s: PositiveFloat = 600
    retention_hours: PositiveFloat = 168
    drain_s: PositiveFloat = 30
    """From TERM to exit, for what is running."""
    accept_when_not_ready: bool = True
    """Whether POST queues while encoder or ranks are away."""
    media_caps: MediaCaps = MediaCaps()
    """Lower than here, never higher: decoders read no more, and neither does the encoder."""
    media_hosts: tuple[Host, ...] = ()
    """Whence media may come by URL; none: media by URL is off."""
    lora_roots: tuple[Path, ...] = ()
    """Folders whose LoRA files a request may name with `lora`; none: requests choose no adapter."""
    media_fetch_s: PositiveFloat = 30
    """For all media of a request together, redirects included."""
    webhook: WebhookSettings = WebhookSettings()
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Where both services send the spans of every job: an OpenTelemetry collector, as in
    http://127.0.0.1:4318/v1/traces. Needs the extra `otel`. None: nowhere."""
    slab_folder: Path = Path("/dev/shm/minimax-h3")
    slab_bytes: PositiveInt | None = None
    """Of the shared memory in which payloads arrive. None: room for two of the largest that the task limits allow."""
    lease_s: PositiveFloat = 60
    """How long a landing, and an encoding that waits for its push, stay without renewal."""
    encode_timeout_s: PositiveFloat = 600
    stuck_s: PositiveFloat = 60
    """A rank that lives and has not worked for this long is stuck."""
    dead_s: PositiveFloat = 10
    """A rank without work that gives no sign of life for this long is dead. One that exits is found at once."""
    load_s: PositiveFloat = 1800
    """Loading, compile and warm-up of a rank group."""
    internal_token: SecretStr | None = None
    """Shared by both services; needed to listen on another address than loopback."""
    internal_token_file: Path | None = None
    """Instead of `internal_token`: a file that holds it."""
