"""What the diffusion service asks of the encoder service, and what it is told: the internal HTTP API."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from shared_schema.encoder_output import Manifest
from shared_schema.tasks import Task
from shared_schema.trace import Span

SCHEMA_VERSION = 1
"""Version of the internal API. A service also reads the previous one, once there is one."""
READ_VERSIONS = frozenset({1})

ReferenceKind = Literal["image", "video", "audio"]


class Wire(BaseModel):
    """Base of everything that crosses between the services: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReferenceInput(Wire):
    """One uploaded file of a request, in request order. The n-th `file` part holds the n-th reference's bytes."""

    kind: ReferenceKind
    use_audio: bool = True
    """Whether a video's own sound comes along."""
    start_seconds: float = Field(default=0.0, ge=0)
    """Where in the file the reference begins, in seconds of media time."""


class EncodeRequest(Wire):
    """One request for conditioning, with its geometry already resolved. JSON part `request` of `POST /v1/encodings`."""

    schema_version: int = SCHEMA_VERSION
    request_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    task: Task
    prompt: str
    height: int
    width: int
    """Canvas of the clip, pixels."""
    num_frames: int
    keyframes: tuple[Literal[0, -1], ...] = ()
    """For `fl2va`: which end of the clip the n-th reference is."""
    references: tuple[ReferenceInput, ...] = ()


class UsedReference(Wire):
    """What the encoder really used of one reference."""

    index: int
    kind: ReferenceKind
    width: int | None = None
    height: int | None = None
    """Pixels after orientation and aspect correction, before any resize."""
    used_width: int | None = None
    used_height: int | None = None
    """Pixels that the video VAE encoded."""
    frames: int | None = None
    seconds: float | None = None
    audio_seconds: float | None = None
    sha256: str
    """Of the uploaded bytes, hex."""

    def encoded_at(self, width: int, height: int) -> Self:
        """With the size at which the video VAE encodes it."""
        return self.model_copy(update={"used_width": width, "used_height": height})


class EncodeProgress(Wire):
    """The last part that is finished of an encoding under way."""

    stage: Literal["media", "text", "vae"]
    """Files decoded and sized; text encoder; tiles of the video VAE on the leader."""
    done: int = Field(default=1, ge=0)
    of: int = Field(default=1, ge=1)


class Encoding(Wire):
    """A finished encoding that waits in the encoder's leader for its push."""

    id: str
    endpoint: str
    """URL of the process that holds it: push and DELETE go there."""
    manifest: Manifest
    references: tuple[UsedReference, ...]
    timings: dict[str, float]
    """Seconds by stage: media, text, video_vae, audio_vae."""
    expires_at: float
    """Unix time at which an encoding that was not pushed is dropped."""
    spans: tuple[Span, ...] = ()
    """What took time, where the request came with a `traceparent`."""


class ShmLanding(Wire):
    """A reserved range of a slab file on the same host, for one memcpy."""

    kind: Literal["shm"] = "shm"
    path: str
    offset: int = Field(ge=0)
    """Of the landing's header, bytes from the start of the slab."""
    length: int = Field(ge=0)
    """Bytes of payload that follow the header."""
    generation: int = Field(ge=1)
    request_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    deadline: float
    """Unix time after which the sender may no longer write."""


class NixlLanding(Wire):
    """A reserved range of a slab on any host, for one NIXL WRITE. NIXL's own metadata, and integers: no pickle."""

    kind: Literal["nixl"] = "nixl"
    owner: str = Field(min_length=1, max_length=256)
    """Who owns the slab, the same after a restart: a landing of a new `agent` says that the owner's old one is gone."""
    agent: str = Field(min_length=1, max_length=64)
    """NIXL agent that has registered the slab, new at each of its starts."""
    metadata: str = Field(max_length=2**16)
    """What NIXL needs to reach that agent, base64."""
    address: int = Field(ge=0, lt=2**64)
    """Of the first payload byte, in the agent's memory."""
    length: int = Field(ge=0)
    generation: int = Field(ge=1)
    request_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    seconds_left: float = Field(gt=0)
    """Seconds from now in which the sender may write: a duration, for the clocks of two hosts differ."""


class InlineLanding(Wire):
    """No memory at all: the payload comes back as the body of the answer, a safetensors file."""

    kind: Literal["inline"] = "inline"


Landing = Annotated[ShmLanding | NixlLanding | InlineLanding, Field(discriminator="kind")]


class PushRequest(Wire):
    """Body of `POST /v1/encodings/{id}/push`."""

    landing: Landing


class PushReceipt(Wire):
    """The payload is in its landing; the sender's copy is gone."""

    bytes: int
    checksum: str = Field(pattern=r"^[0-9a-f]{16}$")
    """xxh3-64 of the payload bytes."""
    seconds: float
    """From the start of the copy to its end."""
    spans: tuple[Span, ...] = ()
    """As of `Encoding`."""


class ProbeRequest(Wire):
    """Body of `POST /v1/probes`: push `bytes` of a known pattern into the landing, to prove the way."""

    landing: Landing
    bytes: int = Field(ge=1, le=64 * 2**20)


class TokensRequest(Wire):
    """Body of `POST /v1/tokens`."""

    prompt: str


class TokensAnswer(Wire):
    """How many tokens the encoder's tokenizer makes of a prompt."""

    tokens: int


class EncoderIdentity(Wire):
    """`GET /v1/identity`: what a diffusion service compares before it trusts an encoder."""

    schema_version: int
    instance_id: str
    """New at every start of the encoder process."""
    model: str
    weights_revision: str
    text_only: bool
    connector: Literal["SharedMemoryConnector", "NixlConnector"]
    vae_encode_precision: str = "fp32"
    """Of its video VAE: another one makes other bits."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that its ranks use."""
    share_devices: bool = False
    """Whether its stage says that others may use them too."""
