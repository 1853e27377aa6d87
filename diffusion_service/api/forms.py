"""The body of `POST /v1/videos`: multipart, urlencoded or JSON, read piece by piece into names, texts and files.

Bytes are counted before they are kept, files go to the request's upload folder as they arrive, and everything that
touches disk or parses runs in a worker thread. Runs in the API process.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, QuerystringParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from diffusion_service.api.dataurls import DataUrls, TextFilter
from diffusion_service.api.limits import BodyCaps
from diffusion_service.api.uploads import FileSink, UploadedFile
from diffusion_service.jobs.artifacts import UploadFolder
from shared_schema.errors import InvalidRequest, TooLarge, UnsupportedType

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Value = Json | UploadedFile

MAX_DEPTH = 32
"""Of objects and lists in JSON: what is nested is gone through by functions that call themselves."""
_PIECE = 256 * 1024
"""Bytes gathered before a worker thread is asked to take them."""
ENCODER_OUTPUT = "encoder_output"


@dataclass(frozen=True)
class Form:
    """A body: its names and values in the order in which they came."""

    entries: tuple[tuple[str, Value], ...]
    urls: DataUrls


async def read_form(
    request: Request, upload: UploadFolder, caps: BodyCaps, file_cap: int, room: Callable[[int], None]
) -> Form:
    """Read the whole body. `file_cap` is the largest media file of any kind, bytes; `room` raises where the disk has
    none for so many more bytes.

    Raises:
        NotReady: no room on disk.
        UnsupportedType: the Content-Type is none of the three, or the body is compressed.
        TooLarge: the body, a file or the text is over its cap.
        InvalidRequest: the body is not what its Content-Type says.
    """
    storage = _Storage(upload, caps, file_cap, room)
    parser = _parser_for(request, storage)
    _check_length(request, caps)
    try:
        async for piece in _pieces(request.stream()):
            await run_in_threadpool(parser.feed, piece)
        return await run_in_threadpool(parser.finish)
    finally:
        storage.close()


def read_json(text: str, param: str | None) -> Json:
    """JSON as the standard has it: no NaN, no name twice, no nesting deeper than `MAX_DEPTH`.

    Raises:
        InvalidRequest: anything else.
    """

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for name, value in pairs:
            if name in found:
                raise InvalidRequest(f"{name!a} is given twice", param=name)
            found[name] = value
        return found

    def constant(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        value: Json = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON cannot be read: {error}", param=param) from error
    if _deeper(value, MAX_DEPTH):
        raise InvalidRequest(f"the JSON is nested more than {MAX_DEPTH} deep", param=param)
    return value


def _deeper(value: Json, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inside
            for each in level
            if isinstance(each, dict | list)
            for inside in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, dict | list) for each in level)


async def _pieces(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    gathered = bytearray()
    async for chunk in stream:
        gathered += chunk
        if len(gathered) >= _PIECE:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


class _Storage:
    """What one request may still spend, and where its files go."""

    def __init__(self, upload: UploadFolder, caps: BodyCaps, file_cap: int, room: Callable[[int], None]) -> None:
        self.caps = caps
        self.file_cap = file_cap
        self._upload = upload
        self._room = room
        self._sinks: list[FileSink] = []
        self._text = 0
        self._body = 0
        self.urls = DataUrls(lambda: self.open(self.file_cap, None))

    def open(self, cap: int, param: str | None) -> FileSink:
        """The next file; names are numbers, so nothing of the caller's reaches the file system."""
        if len(self._sinks) >= self.caps.files:
            raise InvalidRequest(f"a request has at most {self.caps.files} files", param=param)
        sink = FileSink(self._upload.file(f"{len(self._sinks):03d}"), cap, param)
        self._sinks.append(sink)
        return sink

    def close(self) -> None:
        """Nothing more comes: no file stays open, whole or not."""
        for sink in self._sinks:
            sink.close()

    def count_text(self, size: int, param: str | None) -> None:
        self._text += size
        if self._text > self.caps.text_bytes:
            raise TooLarge(f"the text of a request has at most {self.caps.text_bytes} bytes", param=param)

    def count_body(self, size: int) -> None:
        """Bytes as they come, or less than none for those that have a cap of their own."""
        self._body += size
        if self._body > self.caps.body_bytes:
            raise TooLarge(f"a body has at most {self.caps.body_bytes} bytes")
        self._room(max(size, 0))


class _Parser(Protocol):
    def feed(self, piece: bytes) -> None: ...

    def finish(self) -> Form: ...


def _parser_for(request: Request, storage: _Storage) -> _Parser:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedType("send the body without Content-Encoding")
    kind, options = parse_options_header(request.headers.get("content-type"))
    match kind:
        case b"multipart/form-data":
            boundary = options.get(b"boundary")
            if not boundary:
                raise InvalidRequest("the Content-Type multipart/form-data names no boundary")
            return _Multipart(storage, boundary)
        case b"application/x-www-form-urlencoded":
            return _Urlencoded(storage)
        case b"application/json":
            return _JsonBody(storage)
        case _:
            raise UnsupportedType("send multipart/form-data, application/x-www-form-urlencoded or application/json")


def _check_length(request: Request, caps: BodyCaps) -> None:
    with suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > caps.body_bytes + caps.encoder_output_bytes:
            raise TooLarge(f"a body has at most {caps.body_bytes} bytes")


class _Text:
    """One text being read: UTF-8, counted, with long `data:` URLs taken out."""

    def __init__(self, storage: _Storage, param: str | None) -> None:
        self._storage = storage
        self._param = param
        self._filter: TextFilter = storage.urls.text()
        self._kept = bytearray()

    def feed(self, data: bytes) -> None:
        self._keep(self._filter.feed(data))

    def finish(self) -> str:
        self._keep(self._filter.finish())
        try:
            return self._kept.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest("text is UTF-8", param=self._param) from error

    def _keep(self, text: bytes) -> None:
        self._storage.count_text(len(text), self._param)
        self._kept += text


class _JsonBody:
    def __init__(self, storage: _Storage) -> None:
        self._storage = storage
        self._text = _Text(storage, None)

    def feed(self, piece: bytes) -> None:
        self._storage.count_body(len(piece))
        self._text.feed(piece)

    def finish(self) -> Form:
        value = read_json(self._text.finish(), None)
        if not isinstance(value, dict):
            raise InvalidRequest("a JSON body is an object")
        return Form(tuple(value.items()), self._storage.urls)


class _Urlencoded:
    def __init__(self, storage: _Storage) -> None:
        self._storage = storage
        self._entries: list[tuple[str, Value]] = []
        self._name = bytearray()
        self._value: _Text | None = None
        self._escape = b""
        self._separators = 0
        self._parser = QuerystringParser(
            {
                "on_field_start": self._start,
                "on_field_name": self._on_name,
                "on_field_data": self._on_data,
                "on_field_end": self._end,
            }
        )

    def feed(self, piece: bytes) -> None:
        self._storage.count_body(len(piece))
        # Counted here and not by the parser: it takes a separator that ends nothing at its leisure.
        self._separators += piece.count(b"&")
        if self._separators > self._storage.caps.fields:
            raise _too_many_fields(self._storage.caps)
        self._parser.write(piece)

    def finish(self) -> Form:
        self._parser.finalize()
        return Form(tuple(self._entries), self._storage.urls)

    def _start(self) -> None:
        self._name.clear()
        self._value, self._escape = None, b""

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._storage.count_text(end - start, None)
        self._name += data[start:end]

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self._value = _Text(self._storage, self._field())
        data = self._escape + data[start:end]
        # An escape may be cut in two by the end of this piece.
        cut = data.rfind(b"%", max(len(data) - 2, 0))
        data, self._escape = (data, b"") if cut < 0 else (data[:cut], data[cut:])
        self._value.feed(_unescape(data))

    def _end(self) -> None:
        name = self._field()
        if self._value is None:
            self._value = _Text(self._storage, name)
        self._value.feed(_unescape(self._escape))
        self._entries.append((name, self._value.finish()))

    def _field(self) -> str:
        return _name_of(_unescape(bytes(self._name)))


class _Multipart:
    def __init__(self, storage: _Storage, boundary: bytes) -> None:
        self._storage = storage
        self._entries: list[tuple[str, Value]] = []
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._param = ""
        self._file_name: bytes | None = None
        self._part: _Text | FileSink | None = None
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._on_header,
                    "on_headers_finished": self._open,
                    "on_part_data": self._on_data,
                    "on_part_end": self._end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the multipart boundary cannot be used: {error}") from error

    def feed(self, piece: bytes) -> None:
        self._storage.count_body(len(piece))
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequest(f"the multipart body cannot be read: {error}") from error

    def finish(self) -> Form:
        if not self._ended:
            raise InvalidRequest("the multipart body ends before its last boundary")
        return Form(tuple(self._entries), self._storage.urls)

    def _begin(self) -> None:
        if len(self._entries) >= self._storage.caps.fields:
            raise _too_many_fields(self._storage.caps)
        self._disposition = b""

    def _on_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        for part in self._header:
            part.clear()

    def _open(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise InvalidRequest("a part of the multipart body names no field")
        self._param = _name_of(options[b"name"])
        self._storage.count_text(len(self._param), None)
        self._file_name = options.get(b"filename")
        if self._file_name is None:
            self._part = _Text(self._storage, self._param)
        else:
            large = self._param == ENCODER_OUTPUT
            cap = self._storage.caps.encoder_output_bytes if large else self._storage.file_cap
            self._part = self._storage.open(cap, self._param)

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        match self._part:
            case FileSink() as sink:
                sink.write(memoryview(data)[start:end])
                if self._param == ENCODER_OUTPUT:
                    self._storage.count_body(start - end)
            case _Text() as text:
                text.feed(data[start:end])

    def _end(self) -> None:
        match self._part:
            case FileSink() as sink:
                file = sink.finish()
                # A page's empty file input sends a nameless file without a byte.
                if self._file_name or file.bytes:
                    self._entries.append((self._param, file))
            case _Text() as text:
                self._entries.append((self._param, text.finish()))
        self._part = None

    def _on_end(self) -> None:
        self._ended = True


def _too_many_fields(caps: BodyCaps) -> InvalidRequest:
    return InvalidRequest(f"a form has at most {caps.fields} fields")


def _name_of(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("field names are UTF-8") from error


def _unescape(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))
