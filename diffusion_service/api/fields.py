"""From a body's names and values to `CreateVideo`, the references in request order, and the caller's payload.

Pure: every error names the field as the caller wrote it. Runs in the API process.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from diffusion_service.api.brackets import Entry, Key, nest, read_names
from diffusion_service.api.dataurls import DataUrls
from diffusion_service.api.forms import ENCODER_OUTPUT, Form, Json, Value, read_json
from diffusion_service.api.uploads import UploadedFile
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest, NotServed
from shared_schema.videos import CreateVideo, MediaReference

M = TypeVar("M", bound=BaseModel)

MEDIA_FIELDS: Mapping[str, ReferenceKind | None] = {
    "input_reference": None,
    "input_references": None,
    "image_reference": "image",
    "video_reference": "video",
    "audio_reference": "audio",
}
"""Fields that carry references, and the kind that the name promises."""

_NOT_SERVED = re.compile(
    r"source_.*|.*_noise_mask|control_.*|long_video.*|continuation_.*|preencode_.*"
    r"|video_codec_options|force_refresh_step_.*|file_id",
    re.DOTALL,
)


@dataclass(frozen=True)
class Source:
    """One reference as the caller gave it: a file or a URL."""

    param: str
    media: UploadedFile | str
    kind: ReferenceKind | None = None
    """What the caller says it is; the content decides."""
    use_audio: bool | None = None
    start_seconds: float | None = None


@dataclass(frozen=True)
class Fields:
    """A request, every field of it proved by itself."""

    create: CreateVideo
    sources: tuple[Source, ...]
    """In request order across all fields."""
    encoder_output: UploadedFile | None
    urls: DataUrls


def read_fields(form: Form) -> Fields:
    """Take a body apart.

    Raises:
        InvalidRequest: an unknown field, a wrong value, or a value given twice; `param` names it.
        NotServed: a known field that this server does not serve.
    """
    entries = [entry for entry in read_names(form.entries) if entry.value is not None]
    for entry in entries:
        _check_text(entry.field, entry.field, None)
        _check_text(entry.value, entry.field, None if entry.field in MEDIA_FIELDS else form.urls)
    media = [(place, entry) for place, entry in enumerate(entries) if entry.field in MEDIA_FIELDS]
    payloads = [entry for entry in entries if entry.field == ENCODER_OUTPUT]
    others = [entry for entry in entries if entry.field not in MEDIA_FIELDS and entry.field != ENCODER_OUTPUT]
    create = _validate(CreateVideo, _values(others), "")
    _check_served(create)
    return Fields(create, _sources(media), _payload(payloads), form.urls)


def _check_text(value: Value, field: str, urls: DataUrls | None) -> None:
    """Refuse what is no Unicode text, and long `data:` URLs where none belongs (`urls` is given)."""
    match value:
        case str():
            if urls and urls.left_in(value):
                raise InvalidRequest(f"{field} holds a data: URL", param=field)
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InvalidRequest(f"{field} holds half of a surrogate pair", param=field) from error
        case dict():
            for key, inside in value.items():
                _check_text(key, field, urls)
                _check_text(inside, field, urls)
        case list():
            for inside in value:
                _check_text(inside, field, urls)


def _values(entries: list[Entry]) -> dict[str, Json]:
    groups: dict[str, list[tuple[tuple[Key, ...], Json]]] = {}
    for entry in entries:
        if isinstance(entry.value, UploadedFile):
            known = entry.field in CreateVideo.model_fields
            raise InvalidRequest(
                f"{entry.field!a} is not a file" if known else _unknown(entry.field), param=entry.field
            )
        _refuse_not_served(entry.field, entry.field)
        groups.setdefault(entry.field, []).append((entry.keys, entry.value))
    if "extra_params" in groups:
        spread = [part for keys, value in groups.pop("extra_params") for part in _spread(keys, value)]
        # An empty object has no parts, and says nothing.
        groups |= {"extra_params": spread} if spread else {}
    values = {field: _without_nulls(nest(group, field)) for field, group in groups.items()}
    extra = values.get("extra_params")
    if isinstance(extra, dict):
        for key in extra:
            _refuse_not_served(key, f"extra_params.{key}")
        if isinstance(target := extra.get("target"), str):
            extra["target"] = _without_nulls(read_json(target, "extra_params.target"))
    return values


def _spread(keys: tuple[Key, ...], value: Json) -> list[tuple[tuple[Key, ...], Json]]:
    """JSON text or an object of `extra_params` as its parts, so that bracket names may stand beside it."""
    if keys != ():
        return [(keys, value)]
    if isinstance(value, str):
        value = read_json(value, "extra_params")
    if value is None:
        return []
    if not isinstance(value, dict):
        raise InvalidRequest("extra_params is an object", param="extra_params")
    return [((key,), inside) for key, inside in value.items()]


def _without_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    return value


def _refuse_not_served(name: str, param: str) -> None:
    if _NOT_SERVED.fullmatch(name):
        raise NotServed(f"{param[:200]!a} is not served by this server", param=param[:200])


def _check_served(create: CreateVideo) -> None:
    if create.audio_mode == "lock_source":
        raise NotServed("this value of audio_mode is not served yet", param="audio_mode")


def _validate(model: type[M], values: object, prefix: str) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join([*([prefix] if prefix else []), *(str(part) for part in first["loc"])])[:200]
        if first["type"] == "extra_forbidden":
            raise InvalidRequest(_unknown(param), param=param) from error
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{param}: {message}", param=param) from error


def _unknown(field: str) -> str:
    return f"unknown field {field[:200]!a}"


def _payload(entries: list[Entry]) -> UploadedFile | None:
    for entry in entries:
        if entry.keys or len(entries) > 1 or not isinstance(entry.value, UploadedFile):
            raise InvalidRequest("encoder_output is one file part of a multipart body", param=ENCODER_OUTPUT)
        return entry.value
    return None


@dataclass(frozen=True)
class _Element:
    """One reference before its parameter has a number."""

    place: int
    """Among all references, by arrival."""
    index: int | None
    """Within its field, where the caller numbered it."""
    value: Value


def _sources(media: list[tuple[int, Entry]]) -> tuple[Source, ...]:
    placed = []
    for field, kind in MEDIA_FIELDS.items():
        elements = _elements(field, [(place, entry) for place, entry in media if entry.field == field])
        places = sorted(element.place for element in elements)
        if all(element.index is not None for element in elements):
            elements = sorted(elements, key=lambda element: element.index or 0)
        for number, (place, element) in enumerate(zip(places, elements, strict=True)):
            param = field if len(elements) == 1 else f"{field}[{number}]"
            placed.append((place, _source(element.value, param, kind)))
    return tuple(source for _, source in sorted(placed, key=lambda pair: pair[0]))


def _elements(field: str, media: list[tuple[int, Entry]]) -> list[_Element]:
    elements = []
    objects: dict[int | None, tuple[int, list[tuple[tuple[Key, ...], Json]]]] = {}
    for place, entry in media:
        index = entry.keys[0] if entry.keys and isinstance(entry.keys[0], int) else None
        inside = entry.keys if index is None else entry.keys[1:]
        if not inside:
            elements += [_Element(place, index, value) for value in _listed(entry.value, field)]
        elif isinstance(entry.value, UploadedFile):
            raise InvalidRequest(f"{field} takes a file as a part named {field}", param=field)
        else:
            objects.setdefault(index, (place, []))[1].append((inside, entry.value))
    elements += [_Element(place, index, nest(parts, field)) for index, (place, parts) in objects.items()]
    return sorted(elements, key=lambda element: element.place)


def _listed(value: Value, field: str) -> list[Value]:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = read_json(value, field)
    if isinstance(value, list):
        return list(value)
    return [value]


def _source(value: Value, param: str, kind: ReferenceKind | None) -> Source:
    match value:
        case UploadedFile():
            return Source(param, value, kind)
        case str():
            return Source(param, value, kind)
        case dict():
            return _referred({k: v for k, v in value.items() if v is not None}, param, kind)
        case _:
            raise InvalidRequest(f"{param} is a file, a URL, or an object with one", param=param)


def _referred(value: dict[str, Json], param: str, kind: ReferenceKind | None) -> Source:
    for key in value:
        _refuse_not_served(key, f"{param}.{key}")
    reference = _validate(MediaReference, value, param)
    kinds: dict[ReferenceKind, str | None] = {
        "image": reference.image_url,
        "video": reference.video_url,
        "audio": reference.audio_url,
    }
    given = [(said, url) for said, url in kinds.items() if url is not None and kind in (None, said)]
    if len(given) != 1 or sum(url is not None for url in kinds.values()) != 1:
        wanted = f"{kind}_url" if kind else "one of image_url, video_url, audio_url"
        raise InvalidRequest(f"{param} is an object with {wanted}", param=param)
    said, url = given[0]
    return Source(param, url, said, reference.use_audio, reference.start_time_seconds)
