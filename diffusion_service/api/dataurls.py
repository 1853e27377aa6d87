"""`data:` URLs: long ones go to disk while the text around them is still arriving. Runs in the API's worker threads.

A 50 MiB clip is 67 MiB of base64. Holding that as text, then as JSON, then as bytes would cost a request several times
its size, so a long run of base64 in any text is decoded into a file as it passes, and a short mark stays in its place.
The mark carries a random token, so that no caller can name a file of another request.
"""

import binascii
import re
import secrets
from collections.abc import Callable

from diffusion_service.api.uploads import FileSink, UploadedFile
from shared_schema.errors import InvalidRequest

_OPENING = b";base64,"
_RUN = re.compile(rb"[A-Za-z0-9+/=]*+(?:\\/[A-Za-z0-9+/=]*+)*+")
_LONG = 32 * 1024
"""Base64 characters from which on a run goes to disk."""
_URL = re.compile(r"data:([^,;]*)(;[^,]*)?,", re.ASCII)


class _Decoder:
    """Base64 in pieces of any length, strictly."""

    def __init__(self, sink: FileSink) -> None:
        self.sink = sink
        self._rest = b""
        self._valid = True

    def write(self, text: bytes) -> None:
        text = self._rest + text.replace(b"\\", b"")
        whole = len(text) - len(text) % 4
        # The last four may hold padding, which is legal at the very end alone: keep them back.
        whole = max(whole - 4, 0)
        self._rest = text[whole:]
        self._decode(text[:whole], last=False)

    def finish(self) -> UploadedFile | None:
        self._decode(self._rest, last=True)
        file = self.sink.finish()
        return file if self._valid else None

    def _decode(self, text: bytes, *, last: bool) -> None:
        if not last and b"=" in text:
            self._valid = False
        if self._valid:
            try:
                self.sink.write(binascii.a2b_base64(text, strict_mode=True))
            except binascii.Error:
                self._valid = False


class DataUrls:
    """The long `data:` URLs of one request. `open_file` gives the next file's sink."""

    def __init__(self, open_file: Callable[[], FileSink]) -> None:
        self._open_file = open_file
        self._token = secrets.token_hex(16)
        self._files: list[UploadedFile | None] = []
        self._mark = re.compile(rf"data:[^,]*;base64,@{self._token}:([0-9]+)")

    def left_in(self, text: str) -> bool:
        """Whether a mark stands in this text: a long `data:` URL came where none belongs."""
        return self._token in text

    def text(self) -> "TextFilter":
        """A filter for one text: a body or one form field."""
        return TextFilter(self)

    def start(self) -> _Decoder:
        """A decoder into the next file."""
        return _Decoder(self._open_file())

    def keep(self, decoder: _Decoder) -> bytes:
        """The mark that stands for what was decoded."""
        self._files.append(decoder.finish())
        return f"@{self._token}:{len(self._files) - 1}".encode()

    def taken(self, url: str) -> UploadedFile | None:
        """The file of a URL that went to disk as it arrived; None for one that is all there, or is no base64."""
        match = self._mark.fullmatch(url)
        return self._files[int(match[1])] if match else None

    def file(self, url: str, param: str) -> UploadedFile:
        """The file of a `data:` URL, from its mark or from its own base64.

        Raises:
            InvalidRequest: not base64.
        """
        match = self._mark.fullmatch(url)
        file = self._files[int(match[1])] if match else self._decode(url, param)
        if file is None:
            raise InvalidRequest("the data: URL is not valid base64", param=param)
        return file

    def _decode(self, url: str, param: str) -> UploadedFile | None:
        match = _URL.match(url)
        if match is None or not (match[2] or "").lower().endswith(";base64"):
            raise InvalidRequest("a data: URL is data:<type>;base64,<bytes>", param=param)
        try:
            data = binascii.a2b_base64(url[match.end() :], strict_mode=True)
        except (binascii.Error, ValueError):
            return None
        sink = self._open_file()
        sink.write(data)
        return sink.finish()


class TextFilter:
    """Bytes of text in, the same bytes out, with long base64 replaced by marks."""

    def __init__(self, urls: DataUrls) -> None:
        self._urls = urls
        self._held = b""
        self._run = bytearray()
        self._in_run = False
        self._decoder: _Decoder | None = None

    def feed(self, data: bytes) -> bytes:
        """The text that is certain so far."""
        data, out = self._held + data, bytearray()
        self._held = b""
        while data:
            data = self._take_run(data, out) if self._in_run else self._take_text(data, out)
        return bytes(out)

    def finish(self) -> bytes:
        """What was held back."""
        out = bytearray()
        if self._in_run:
            self._end_run(out)
        return bytes(out + self._held)

    def _take_text(self, data: bytes, out: bytearray) -> bytes:
        found = data.find(_OPENING)
        if found >= 0:
            end = found + len(_OPENING)
            out += data[:end]
            self._in_run = True
            return data[end:]
        # The opening may be cut in two by the end of this piece.
        keep = next((n for n in range(len(_OPENING) - 1, 0, -1) if data.endswith(_OPENING[:n])), 0)
        out += data[: len(data) - keep]
        self._held = data[len(data) - keep :]
        return b""

    def _take_run(self, data: bytes, out: bytearray) -> bytes:
        match = _RUN.match(data)
        end = match.end() if match else 0
        self._add(data[:end])
        rest = data[end:]
        if rest in (b"", b"\\"):
            self._held = rest
            return b""
        self._end_run(out)
        return rest

    def _add(self, run: bytes) -> None:
        if self._decoder is None:
            self._run += run
            if len(self._run) < _LONG:
                return
            self._decoder, run = self._urls.start(), bytes(self._run)
            self._run.clear()
        self._decoder.write(run)

    def _end_run(self, out: bytearray) -> None:
        out += self._urls.keep(self._decoder) if self._decoder else self._run
        self._run.clear()
        self._decoder, self._in_run = None, False
