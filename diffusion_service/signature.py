"""Signs webhooks as Standard Webhooks asks: HMAC-SHA256 over id, time and body. Runs in the diffusion API process."""

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from shared_schema.errors import DeployError

PREFIX = "whsec_"
SHORTEST, LONGEST = 24, 64
"""Bytes of a secret."""


@dataclass(frozen=True)
class Signer:
    """Holds the secrets. With two of them each message carries both signatures, so that receivers can change over."""

    secrets: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The secrets in a file: `whsec_` and base64 of 24 to 64 bytes, one a line, the newest first.

        Raises:
            DeployError: the file cannot be read or holds something else.
        """
        try:
            lines = path.read_text(encoding="ascii").split()
        except (OSError, UnicodeDecodeError) as error:
            raise DeployError(f"service.webhook.secret_file: {path} cannot be read: {error}") from error
        if not lines:
            raise DeployError(f"service.webhook.secret_file: {path} is empty")
        return cls(tuple(_secret(line, path) for line in lines))

    def headers(self, message_id: str, now: float, body: bytes) -> dict[str, str]:
        """The three headers of a message; `now` is when it is sent, Unix seconds."""
        signed = b".".join((message_id.encode(), b"%d" % now, body))
        made = [hmac.new(secret, signed, hashlib.sha256).digest() for secret in self.secrets]
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now)),
            "webhook-signature": " ".join(f"v1,{base64.b64encode(one).decode()}" for one in made),
        }


def _secret(line: str, path: Path) -> bytes:
    rule = f"service.webhook.secret_file: a line of {path} is not {PREFIX} and base64 of {SHORTEST} to {LONGEST} bytes"
    if not line.startswith(PREFIX):
        raise DeployError(rule)
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error as error:
        raise DeployError(rule) from error
    if not SHORTEST <= len(secret) <= LONGEST:
        raise DeployError(rule)
    return secret
