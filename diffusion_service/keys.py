"""API keys: the file that holds their digests, and whose key a request shows. Runs in the API process and in `keys`.

A key is 256 random bits, so one round of SHA-256 hides it as well as many would.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared_schema.errors import DeployError

_LOG = logging.getLogger(__name__)
Scope = Literal["create", "read_own", "read_all", "admin"]
SCOPES: tuple[Scope, ...] = ("create", "read_own", "read_all", "admin")
NAME = r"[A-Za-z0-9._-]{1,64}"
RELOAD_S = 1.0
"""A key that was added or removed counts after this time at the latest."""


class StoredKey(BaseModel):
    """One key, without the key itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Of the key, hex."""
    created_at: int
    """Unix seconds."""


class StoredKeys(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[StoredKey, ...] = ()


@dataclass(frozen=True)
class Caller:
    """Who sends a request, and what that one may do."""

    name: str | None
    """Of the key; None where no keys are configured."""
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        """Whether the key has that scope; `admin` has all, and who reads all reads its own."""
        implied: dict[Scope, Collection[Scope]] = {"read_own": ("read_own", "read_all")}
        return "admin" in self.scopes or bool(self.scopes & set(implied.get(scope, (scope,))))


EVERYONE = Caller(None, frozenset(SCOPES))
"""Whoever calls a service without keys."""


class KeyRing:
    """The keys of one file, read again when the file changes.

    Raises (when built):
        DeployError: the file cannot be read, or is not what `keys add` writes.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._state = _state_of(file)
        self._looked_at = clock()
        self._keys = read_keys(file).keys
        self.broken: str | None = None
        """Why the file as it is now cannot be used; the keys that were read before it go on."""

    def find(self, key: str) -> Caller | None:
        """Whose key this is. Takes equally long whichever it is, and whether or not it is one."""
        digest = _digest(key)
        found: Caller | None = None
        for stored in self._current():
            if hmac.compare_digest(stored.sha256, digest):
                found = Caller(stored.name, frozenset(stored.scopes))
        return found

    def _current(self) -> tuple[StoredKey, ...]:
        now = self._clock()
        if now - self._looked_at >= RELOAD_S:
            self._looked_at = now
            state = _state_of(self._file)
            if state != self._state:
                self._state = state
                self._reload()
        return self._keys

    def _reload(self) -> None:
        try:
            self._keys = read_keys(self._file).keys
            self.broken = None
        except DeployError as error:
            self.broken = error.message
            _LOG.error("%s: the keys that were read before go on", error.message)


def read_keys(file: Path) -> StoredKeys:
    """The file as it is.

    Raises:
        DeployError: it cannot be read, or is not what `keys add` writes.
    """
    try:
        keys = StoredKeys.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DeployError(
            f"service.keys_file: {file} cannot be read: {error.strerror}: `h3-diffusion keys add` makes it"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DeployError(f"service.keys_file: {file}: {place} {first['msg']}".replace("  ", " ")) from None
    names = [key.name for key in keys.keys]
    for name in names:
        if names.count(name) > 1:
            raise DeployError(f"service.keys_file: {file} names {name} twice")
    return keys


def add_key(file: Path, name: str, scopes: tuple[Scope, ...]) -> str:
    """Add a key and return it: nobody can read it again.

    Raises:
        DeployError: the name is taken or not a name, or the file cannot be used.
    """
    key = f"h3_{secrets.token_urlsafe(32)}"
    with _changing(file) as kept:
        if any(stored.name == name for stored in kept.keys):
            raise DeployError(f"{file} has a key named {name} already: `keys remove {name}` first")
        try:
            new = StoredKey(name=name, scopes=scopes, sha256=_digest(key), created_at=int(time.time()))
        except ValidationError:
            raise DeployError(f"a key's name is 1 to 64 of A-Z a-z 0-9 . _ -, not {name[:80]!r}") from None
        _write(file, StoredKeys(keys=(*kept.keys, new)))
    return key


def remove_key(file: Path, name: str) -> None:
    """Take a key away; the jobs that belong to it stay.

    Raises:
        DeployError: there is none of that name, or the file cannot be used.
    """
    with _changing(file) as kept:
        left = tuple(stored for stored in kept.keys if stored.name != name)
        if len(left) == len(kept.keys):
            raise DeployError(f"{file} has no key named {name[:80]}")
        _write(file, StoredKeys(keys=left))


@contextmanager
def _changing(file: Path) -> Iterator[StoredKeys]:
    """The present keys, while nobody else changes them."""
    try:
        with file.with_name(f"{file.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield read_keys(file) if file.exists() else StoredKeys()
    except OSError as error:
        raise DeployError(f"{file} cannot be written: {error.strerror}") from None


def _write(file: Path, keys: StoredKeys) -> None:
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(json.dumps(keys.model_dump(mode="json"), indent=2) + "\n")
    part.replace(file)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino
