"""What makes a POST known again: an `Idempotency-Key`, or the SDK's word that it repeats itself. In the API process."""

import hashlib
import json
import re

from starlette.datastructures import Headers

from diffusion_service.api.fields import Fields, Source
from diffusion_service.api.uploads import UploadedFile
from diffusion_service.jobs.idempotency import Idempotency
from shared_schema.errors import InvalidRequest

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_COUNT = re.compile(r"[0-9]{1,6}")
KEY_HEADER, COUNT_HEADER = "Idempotency-Key", "x-stainless-retry-count"


def read_key(headers: Headers) -> str | None:
    """The request's key, or None; looked at before the body is read.

    Raises:
        InvalidRequest: it is no key.
    """
    key = headers.get(KEY_HEADER)
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest("an Idempotency-Key is 1 to 255 printable characters without spaces", param=KEY_HEADER)
    return key


def identify(headers: Headers, fields: Fields) -> Idempotency:
    """Key, digest of fields and media, and whether the client repeats by itself.

    The digest is of what the request says, in whatever content type: files by their bytes, URLs by their text.
    """
    count = headers.get(COUNT_HEADER, "")
    retry = _COUNT.fullmatch(count) is not None and int(count) > 0
    return Idempotency(idempotency_key=read_key(headers), digest=_digest(fields), retry=retry)


def _digest(fields: Fields) -> str:
    said = {
        "create": fields.create.model_dump(mode="json", exclude_none=True),
        "sources": [[*_source(source), _content(source.media, fields)] for source in fields.sources],
        "encoder_output": fields.encoder_output.sha256 if fields.encoder_output else None,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _source(source: Source) -> list[str | float | bool | None]:
    return [source.param, source.kind, source.use_audio, source.start_seconds]


def _content(media: UploadedFile | str, fields: Fields) -> str:
    if isinstance(media, str):
        taken = fields.urls.taken(media)
        return media if taken is None else taken.sha256
    return media.sha256
