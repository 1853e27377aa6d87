"""Bodies of every kind, whole, cut, broken and endless."""

import asyncio
import base64
import json
import random
import threading
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from diffusion_service.api.forms import Form, read_form, read_json
from diffusion_service.api.limits import BodyCaps
from diffusion_service.api.uploads import FileSink, UploadedFile
from diffusion_service.jobs.artifacts import UploadFolder
from shared_schema.errors import H3Error, InvalidRequest, TooLarge, UnsupportedType

MIB = 2**20
BOUNDARY = "XyZ"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"
CAPS = BodyCaps(body_bytes=4 * MIB, text_bytes=MIB, encoder_output_bytes=8 * MIB, files=4, fields=6)


def read(
    folder: Path, content_type: str | None, pieces: Iterable[bytes], *, leaves: bool = False, **headers: str
) -> Form:
    """Read a body that arrives in these pieces, and whose sender may leave at their end."""
    rest = iter(pieces)

    async def receive() -> Message:
        for piece in rest:
            return {"type": "http.request", "body": piece, "more_body": True}
        return {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"", "more_body": False}

    sent = {**headers, **({"content-type": content_type} if content_type else {})}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in sent.items()]
    request = Request({"type": "http", "method": "POST", "headers": raw}, receive)
    folder.mkdir(exist_ok=True)
    return asyncio.run(read_form(request, UploadFolder(folder), CAPS, MIB, lambda more: None))


def part(name: str, value: bytes, file_name: str | None = None) -> bytes:
    file = "" if file_name is None else f'; filename="{file_name}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


def test_one_request_reads_the_same_in_every_content_type(tmp_path: Path) -> None:  # case 13
    expected = (("prompt", "a & b = ü"), ("extra_params", '{"task": "t2va"}'))
    body = part("prompt", "a & b = ü".encode()) + part("extra_params", b'{"task": "t2va"}') + END
    assert read(tmp_path / "m", MULTIPART, [body]).entries == expected
    urlencoded = b"prompt=a+%26+b+%3D+%C3%BC&extra_params=%7B%22task%22:+%22t2va%22%7d"
    assert read(tmp_path / "u", "application/x-www-form-urlencoded", [urlencoded]).entries == expected
    as_json = json.dumps({"prompt": "a & b = ü", "extra_params": {"task": "t2va"}}).encode()
    form = read(tmp_path / "j", "application/json; charset=utf-8", [as_json])
    assert form.entries == (("prompt", "a & b = ü"), ("extra_params", {"task": "t2va"}))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_of_any_size_read_the_same(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_service.api.forms._PIECE", 1)
    data = random.Random(size).randbytes(3000) + f"\r\n--{BOUNDARY[:-1]}".encode()
    body = part("input_references", data, "a.png") + part("seed", b"1") + part("input_references", b"2", "a.png") + END
    form = read(tmp_path, MULTIPART, [body[i : i + size] for i in range(0, len(body), size)])
    (_, first), seed, (_, second) = form.entries
    assert isinstance(first, UploadedFile)
    assert isinstance(second, UploadedFile)
    assert (first.path.read_bytes(), second.path.read_bytes(), seed) == (data, b"2", ("seed", "1"))
    assert first.path.parent == tmp_path


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_an_escape_may_be_cut(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_service.api.forms._PIECE", 1)
    body = b"prompt=%C3%BC+%25+100%&a%5Bb%5D=%41"
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    form = read(tmp_path, "application/x-www-form-urlencoded", pieces)
    assert form.entries == (("prompt", "ü % 100%"), ("a[b]", "A"))


def test_names_of_the_caller_never_reach_the_disk(tmp_path: Path) -> None:  # case 24
    body = part("input_reference", b"1", "../../../etc/passwd") + part("../x", b"2", "/tmp/x") + END
    read(tmp_path, MULTIPART, [body])
    assert {path.name for path in tmp_path.iterdir()} == {"000", "001"}


def test_an_empty_file_input_of_a_page_is_absent(tmp_path: Path) -> None:
    form = read(tmp_path, MULTIPART, [part("input_reference", b"", "") + part("prompt", b"x") + END])
    assert form.entries == (("prompt", "x"),)
    named = read(tmp_path / "named", MULTIPART, [part("input_reference", b"", "a.png") + END])
    assert len(named.entries) == 1


@pytest.mark.parametrize("kind", ["text/plain", "multipart/mixed; boundary=x", "application/octet-stream", None, ""])
def test_another_content_type_is_415(tmp_path: Path, kind: str | None) -> None:  # case 13
    with pytest.raises(UnsupportedType):
        read(tmp_path, kind, [b"x"])


def test_a_compressed_body_is_415(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedType):
        read(tmp_path, "application/json", [b"{}"], content_encoding="gzip")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),  # no boundary
        ("multipart/form-data; boundary=", b"x"),
        (MULTIPART, b""),
        (MULTIPART, b"no boundary at all"),
        (MULTIPART, part("prompt", b"x")),  # the last boundary is missing
        (MULTIPART, part("input_reference", b"x", "a")[:-5]),
        (MULTIPART, f"--{BOUNDARY}\r\nContent-Type: text/plain\r\n\r\nx\r\n".encode() + END),
        (MULTIPART, part("prompt", b"\xff\xfe") + END),
        ("application/x-www-form-urlencoded", b"prompt=%ff"),
        ("application/json", b""),
        ("application/json", b"[1]"),
        ("application/json", b'"x"'),
        ("application/json", b'{"seed": NaN}'),
        ("application/json", b'{"seed": 1, "seed": 2}'),
        ("application/json", b'{"a": ' + b"[" * 100_000),
        ("application/json", b'{"seed": ' + b"9" * 5000 + b"}"),
        ("application/json", '{"prompt": "ü"}'.encode("latin-1")),
        ("application/json", '{"prompt": "x"}'.encode("utf-16")),
    ],
)
def test_a_body_that_is_not_what_it_says_is_400(tmp_path: Path, kind: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(tmp_path, kind, [body])


@pytest.mark.parametrize(
    ("kind", "start", "piece", "least_mib", "most_mib"),
    [
        (MULTIPART, part("input_reference", b"", "a")[:-2], b"\0" * 65536, 1, 2),
        (MULTIPART, part("encoder_output", b"", "a")[:-2], b"\0" * 65536, 8, 9),
        (MULTIPART, part("prompt", b"")[:-2], b"x" * 65536, 1, 2),
        (MULTIPART, b"\r\n", b"x" * 65536, 0, 5),
        ("application/json", b'{"prompt": "', b"x" * 65536, 1, 2),
        ("application/json", b'{"image_reference": "data:;base64,', b"A" * 65536, 1, 2),
        ("application/x-www-form-urlencoded", b"prompt=", b"x" * 65536, 1, 2),
        ("application/x-www-form-urlencoded", b"", b"x" * 65536, 1, 2),
        ("application/x-www-form-urlencoded", b"a=", b"&" * 65536, 0, 5),
    ],
)
@pytest.mark.steady
def test_an_endless_body_ends_at_its_cap(
    tmp_path: Path, kind: str, start: bytes, piece: bytes, least_mib: int, most_mib: int
) -> None:  # case 14
    sent = 0

    def endless() -> Iterable[bytes]:
        nonlocal sent
        yield start
        while True:
            sent += len(piece)
            yield piece

    tracemalloc.start()
    with pytest.raises((TooLarge, InvalidRequest)):
        read(tmp_path, kind, endless())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert least_mib * MIB <= sent <= most_mib * MIB
    assert peak < 6 * MIB


def test_a_body_that_says_it_is_too_long_is_not_read(tmp_path: Path) -> None:  # case 14
    def never() -> Iterable[bytes]:
        raise AssertionError
        yield b""

    with pytest.raises(TooLarge):
        read(tmp_path, MULTIPART, never(), content_length=str(13 * MIB))


def test_bytes_of_an_encoder_output_have_a_cap_of_their_own(tmp_path: Path) -> None:
    body = part("encoder_output", bytes(6 * MIB), "p.safetensors") + part("prompt", b"x") + END
    form = read(tmp_path, MULTIPART, [body[i : i + MIB] for i in range(0, len(body), MIB)])
    assert isinstance(file := form.entries[0][1], UploadedFile)
    assert file.bytes == 6 * MIB


def test_too_many_files_or_fields_are_400(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="4 files"):
        read(tmp_path / "a", MULTIPART, [part("a", b"x", "a") * 5 + END])
    with pytest.raises(InvalidRequest, match="6 fields"):
        read(tmp_path / "b", MULTIPART, [part("a", b"x") * 7 + END])
    with pytest.raises(InvalidRequest, match="6 fields"):
        read(tmp_path / "c", "application/x-www-form-urlencoded", [b"a=1&" * 7])


@pytest.mark.steady
def test_long_urls_of_a_json_body_cost_no_memory(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(MIB)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    body = json.dumps({"video_reference": [{"video_url": url}, {"video_url": url}]}).encode()
    tracemalloc.start()
    form = read(tmp_path, "application/json", (body[i : i + 65536] for i in range(0, len(body), 65536)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * MIB
    ((_, references),) = form.entries
    assert isinstance(references, list)
    for reference in references:
        assert isinstance(reference, dict)
        assert form.urls.file(str(reference["video_url"]), "a").path.read_bytes() == data


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_sender_that_leaves_is_noticed(tmp_path: Path, share: float) -> None:  # case 6
    body = part("input_reference", bytes(MIB // 2), "a.mp4") + END
    with pytest.raises(ClientDisconnect):
        read(tmp_path, MULTIPART, [body[: int(len(body) * share)]], leaves=True)


def test_the_event_loop_turns_while_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, turned = threading.Event(), threading.Event()
    write = FileSink.write

    def write_once_the_loop_has_turned(sink: FileSink, data: bytes) -> None:
        writing.set()
        assert turned.wait(60), "the event loop stood still"
        write(sink, data)

    async def both() -> None:
        pieces = iter([part("input_reference", bytes(MIB - 1), "a"), END])

        async def receive() -> Message:
            return {"type": "http.request", "body": next(pieces, b""), "more_body": bool(pieces.__length_hint__())}

        async def turn() -> None:
            while not writing.is_set():
                await asyncio.sleep(0.001)
            turned.set()

        turning = asyncio.create_task(turn())
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", MULTIPART.encode())]}
        await read_form(Request(scope, receive), UploadFolder(tmp_path), CAPS, MIB, lambda more: None)
        await turning

    monkeypatch.setattr(FileSink, "write", write_once_the_loop_has_turned)
    asyncio.run(both())


def test_json_says_which_name_is_double() -> None:
    with pytest.raises(H3Error) as caught:
        read_json('{"a": {"b": 1, "b": 1}}', "extra_params")
    assert caught.value.param == "b"


@pytest.mark.timeout(60)  # comparing every name with all others takes minutes
def test_json_may_have_very_many_names() -> None:
    names = {f"{number:x}": 0 for number in range(150_000)}
    assert read_json(json.dumps(names), None) == names


@pytest.mark.parametrize("text", ["[" * 33 + "]" * 33, '{"a":' * 33 + "0" + "}" * 33, "[" * 100_000])
def test_json_that_is_nested_too_deep_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_json(text, None)
    assert read_json("[" * 32 + "]" * 32, None) is not None
