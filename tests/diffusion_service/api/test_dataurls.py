"""Long `data:` URLs leave the text as it passes, whole and counted."""

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_service.api.dataurls import DataUrls
from diffusion_service.api.uploads import FileSink
from shared_schema.errors import InvalidRequest, TooLarge

CAP = 300_000


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[DataUrls]:
    sinks: list[FileSink] = []

    def open_file() -> FileSink:
        sinks.append(FileSink(tmp_path / f"{len(sinks):04d}", CAP, None))
        return sinks[-1]

    yield DataUrls(open_file)
    for sink in sinks:
        sink.close()


def passed(urls: DataUrls, text: bytes, cuts: list[int]) -> str:
    """The text behind the filter when it arrives in pieces cut there."""
    reader, out, start = urls.text(), b"", 0
    for cut in [*sorted(cuts), len(text)]:
        out += reader.feed(text[start:cut])
        start = cut
    return (out + reader.finish()).decode()


def url_of(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 24_574, 24_575, 24_576, 24_577, 24_578, 100_001])
def test_bytes_survive_any_length(urls: DataUrls, size: int) -> None:
    data = random.Random(size).randbytes(size)
    text = json.dumps({"audio_url": url_of(data), "use_audio": True})
    left = json.loads(passed(urls, text.encode(), []))
    file = urls.file(left["audio_url"], "audio_reference")
    assert file.path.read_bytes() == data
    assert file.bytes == size
    assert left["use_audio"] is True


def test_pieces_may_be_cut_anywhere(urls: DataUrls) -> None:
    data = random.Random(1).randbytes(25_000)
    text = json.dumps([url_of(data), "between", url_of(data)]).replace("/", "\\/").encode()
    chance, middle = random.Random(2), text.index(b"between")
    spots = [*range(1, 40), *range(middle - 12, middle + 40), *range(len(text) - 8, len(text))]
    spots += [n + 1 for n in range(len(text)) if text[n : n + 1] == b"\\"][:20]
    for cut in spots:
        left = passed(urls, text, [cut, chance.randrange(len(text))])
        assert len(left) < 250
        first, between, second = json.loads(left)
        assert between == "between"
        for url in (first, second):
            file = urls.file(url, "a")
            assert file.path.read_bytes() == data
            file.path.unlink()


def test_long_base64_leaves_a_short_text(urls: DataUrls) -> None:
    text = json.dumps(url_of(bytes(200_000))).encode()
    assert len(passed(urls, text, [])) < 100


def test_other_text_passes_unchanged(urls: DataUrls) -> None:
    for text in ("", "a;base64", "a;base64,", ";base64,AAAA;base64,AAAA", "\\", ";base64,\\", ";base64,AB\\u00e9"):
        for cut in range(len(text) + 1):
            assert passed(urls, text.encode(), [cut]) == text


@pytest.mark.parametrize("spoil", [3, 20_000, 60_000])
@pytest.mark.parametrize("what", ["=", "%", "A"])
def test_broken_base64_is_refused(urls: DataUrls, spoil: int, what: str) -> None:
    url = url_of(bytes(60_001))
    start = url.index(",") + 1 + spoil
    broken = url[:start] + what + url[start:]
    left = passed(urls, broken.encode(), [])
    with pytest.raises(InvalidRequest, match="base64") as caught:
        urls.file(left, "audio_reference")
    assert caught.value.param == "audio_reference"


def test_padding_ends_a_url_wherever_it_is_cut(urls: DataUrls) -> None:
    text = b"data:;base64," + b"A" * 40_000 + b"QQ=="
    for more in (b"AAAA", b"QQ==", b"A"):
        with pytest.raises(InvalidRequest):
            urls.file(passed(urls, text + more, [len(text)]), "a")
    assert urls.file(passed(urls, text, [len(text) - 1]), "a").bytes == 30_001


def test_a_mark_cannot_be_forged(urls: DataUrls, tmp_path: Path) -> None:
    mine = passed(urls, url_of(bytes(50_000)).encode(), [])
    other = DataUrls(lambda: FileSink(tmp_path / "other", CAP, None))
    with pytest.raises(InvalidRequest):
        other.file(mine, "a")
    assert urls.left_in(mine)
    assert not other.left_in(mine)


def test_a_url_over_the_cap_ends_while_it_arrives(urls: DataUrls) -> None:  # case 14
    reader = urls.text()
    reader.feed(b'"data:video/mp4;base64,')
    for _ in range(CAP * 4 // 3 // 10_000):
        reader.feed(b"A" * 10_000)
    with pytest.raises(TooLarge):
        reader.feed(b"A" * 10_000)


@pytest.mark.parametrize("url", ["data:text/plain,hello", "data:", "data:;base64", "data:a/b;charset=x,AAAA"])
def test_a_url_without_base64_is_refused(urls: DataUrls, url: str) -> None:
    with pytest.raises(InvalidRequest):
        urls.file(url, "a")
