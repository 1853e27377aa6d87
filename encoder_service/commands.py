"""What the encoder's API process asks of its ranks, and what they answer. Frozen, no torch."""

from dataclasses import dataclass
from pathlib import Path

from shared_schema.deploy.model import EncoderStage, NixlExtra
from shared_schema.deploy.settings import LogFormat, LogLevel
from shared_schema.encode import EncodeRequest, Landing, PushReceipt, UsedReference
from shared_schema.encoder_output import Manifest


@dataclass(frozen=True)
class EncoderRankSettings:
    """What an encoder rank needs to know before it loads."""

    checkpoint: Path
    stage: EncoderStage
    text_only: bool
    """The text-only split: the VAE encoders belong to the other service."""
    slab_folder: Path
    """The only folder in which landings may lie."""
    nixl: NixlExtra | None
    """Send over NIXL, with these options; None: through shared memory."""
    log_level: LogLevel
    log_format: LogFormat


@dataclass(frozen=True)
class Encode:
    """Make the conditioning of one request; the leader keeps the payload until it is pushed or dropped."""

    encoding_id: str
    request: EncodeRequest
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Encoded:
    """The payload waits in the leader."""

    manifest: Manifest
    references: tuple[UsedReference, ...]
    timings: dict[str, float]


@dataclass(frozen=True)
class Push:
    """Write a waiting payload into its landing and forget it."""

    encoding_id: str
    landing: Landing


@dataclass(frozen=True)
class Pushed:
    """Where the payload went; `blob` holds it where the landing was inline."""

    receipt: PushReceipt
    blob: bytes | None = None


@dataclass(frozen=True)
class Drop:
    """Forget a waiting payload."""

    encoding_id: str


@dataclass(frozen=True)
class Probe:
    """Write `nbytes` of a known pattern into a landing."""

    landing: Landing
    nbytes: int


@dataclass(frozen=True)
class Tidy:
    """Let go of slabs whose owners are gone."""


@dataclass(frozen=True)
class CountTokens:
    """How many tokens a prompt has; the answer is an `int`."""

    prompt: str
