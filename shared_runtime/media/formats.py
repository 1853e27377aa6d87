"""Which format a file is, by its first bytes and its streams, never by its name. API threads and encoder ranks."""

from dataclasses import dataclass
from pathlib import Path

from shared_runtime.media.boundary import DEFAULT_CAPS, check_bytes, decoding
from shared_runtime.media.container import open_container, picture_stream, sound_stream
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest

HEAD_BYTES = 4096


@dataclass(frozen=True)
class Format:
    """A format that is read here."""

    name: str
    kind: ReferenceKind | None
    """None where only the streams tell a video from a sound."""
    readers: tuple[str, ...]
    """Names of the only decoders that may open it: Pillow's for an image, FFmpeg's otherwise."""


JPEG = Format("JPEG", "image", ("JPEG", "MPO"))
PNG = Format("PNG", "image", ("PNG",))
GIF = Format("GIF", "image", ("GIF",))
WEBP = Format("WEBP", "image", ("WEBP",))
MP4 = Format("MP4", None, ("mov",))
WEBM = Format("WEBM", None, ("matroska",))
WAV = Format("WAV", "audio", ("wav",))
FLAC = Format("FLAC", "audio", ("flac",))
OGG = Format("OGG", "audio", ("ogg",))
MP3 = Format("MP3", "audio", ("mp3",))

READ_FORMATS = "JPEG, PNG, WEBP and GIF images, MP4, MOV and WEBM videos, WAV, MP3, FLAC, OGG and M4A sounds"

_STARTS = {
    b"\xff\xd8\xff": JPEG,
    b"\x89PNG\r\n\x1a\n": PNG,
    b"GIF87a": GIF,
    b"GIF89a": GIF,
    b"fLaC": FLAC,
    b"OggS": OGG,
    b"ID3": MP3,
}
_RIFF_FORMS = {b"WAVE": WAV, b"WEBP": WEBP}
_QUICKTIME_ATOMS = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1", b"avif", b"avis"})
_EBML = b"\x1a\x45\xdf\xa3"
_DOCTYPE = b"\x42\x82"


def sniff(path: Path, param: str | None) -> Format:
    """The format of a file's first bytes.

    Raises:
        InvalidRequest: empty, or no format that is read here.
    """
    with decoding("file", param), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head:
        raise InvalidRequest("the file is empty", param=param)
    if head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS:
        raise InvalidRequest("HEIC and AVIF images are not read here, send JPEG or PNG", param=param)
    found = _format_of(head)
    if found is None:
        raise InvalidRequest(f"the file is none of what is read here: {READ_FORMATS}", param=param)
    return found


def _format_of(head: bytes) -> Format | None:
    for start, found in _STARTS.items():
        if head.startswith(start):
            return found
    if head[:4] in (b"RIFF", b"RF64"):
        return _RIFF_FORMS.get(head[8:12])
    if head[4:8] in _QUICKTIME_ATOMS:
        return MP4
    if head.startswith(_EBML):
        return WEBM if _is_webm(head) else None
    return MP3 if _is_mpeg_sound(head) else None


def _is_webm(head: bytes) -> bool:
    """Whether an EBML header's document type is `webm` (Matroska has the same first bytes)."""
    at = head.find(_DOCTYPE, 4, 128)
    return at >= 0 and head[at + 3 : at + 7] == b"webm"


def _is_mpeg_sound(head: bytes) -> bool:
    """Whether the bytes begin with the header of an MPEG audio frame: sync, version, layer, bit rate, sample rate."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    return version != 1 and layer != 0 and head[2] >> 4 not in (0, 15) and head[2] >> 2 & 3 != 3


def kind_of(path: Path, found: Format, param: str | None) -> ReferenceKind:
    """Whether a file of a known format is an image, a video or a sound.

    Raises:
        InvalidRequest: it cannot be opened, or holds neither picture nor sound.
    """
    if found.kind is not None:
        return found.kind
    check_bytes(path, DEFAULT_CAPS.video_bytes, "file", param)
    with decoding("file", param), open_container(path, found.readers[0]) as container:
        if picture_stream(container) is not None:
            return "video"
        if sound_stream(container) is not None:
            return "audio"
    raise InvalidRequest(f"the {found.name} file holds neither a picture nor a sound", param=param)


def classify(path: Path, param: str | None = None) -> ReferenceKind:
    """What a file is, by its content alone.

    Raises:
        InvalidRequest: no format that is read here, or it cannot be opened.
    """
    return kind_of(path, sniff(path, param), param)


def expect(path: Path, kind: ReferenceKind, param: str | None) -> Format:
    """The format of a file that has to be of one kind.

    Raises:
        InvalidRequest: it is of another kind, or no format that is read here.
    """
    found = sniff(path, param)
    is_kind = kind_of(path, found, param)
    if is_kind != kind:
        raise InvalidRequest(f"the file is of kind {is_kind}, not {kind}", param=param)
    return found
