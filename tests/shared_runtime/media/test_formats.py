"""Files are told apart by their content."""

import shutil
from pathlib import Path

import pytest

from shared_runtime.media import classify
from shared_schema.encode import ReferenceKind
from shared_schema.errors import InvalidRequest

KINDS: dict[ReferenceKind, tuple[str, ...]] = {
    "image": ("img_quad.png", "img_quad.jpg", "img_quad.webp", "img_anim.gif"),
    "video": ("vid_24fps.mp4", "vid_quicktime.mov", "vid_webm.webm"),
    "audio": ("aud_15s.wav", "aud_stereo.mp3", "aud_stereo.flac", "aud_stereo.ogg", "aud_vorbis.ogg", "aud_stereo.m4a"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_every_read_format_is_known_under_a_wrong_name(
    cases: Path, tmp_path: Path, kind: ReferenceKind, name: str
) -> None:
    lying = tmp_path / ("file.wav" if kind == "image" else "file.png")
    shutil.copy(cases / name, lying)
    assert classify(lying) == kind


@pytest.mark.parametrize("name", ["fake.png", "aud_bad.wav", "vid_nomoov.mp4", "empty.png", "lora_trunc.safetensors"])
def test_what_is_no_media_is_refused_by_param(cases: Path, name: str) -> None:  # case 11
    with pytest.raises(InvalidRequest) as caught:
        classify(cases / name, "input_reference")
    assert caught.value.param == "input_reference"


def test_heic_is_refused_by_name(cases: Path) -> None:
    with pytest.raises(InvalidRequest, match="HEIC"):
        classify(cases / "img_heic.heic")


def test_a_playlist_is_not_followed(cases: Path, tmp_path: Path) -> None:
    playlist = tmp_path / "list.mp4"
    playlist.write_text(f"#EXTM3U\n#EXTINF:5,\n{cases / 'vid_24fps.mp4'}\n#EXT-X-ENDLIST\n")
    with pytest.raises(InvalidRequest, match="none of what is read"):
        classify(playlist)


def test_matroska_that_is_not_webm_is_refused(cases: Path, tmp_path: Path) -> None:
    other = tmp_path / "film.webm"
    other.write_bytes((cases / "vid_webm.webm").read_bytes().replace(b"\x42\x82\x84webm", b"\x42\x82\x84mkvm", 1))
    with pytest.raises(InvalidRequest, match="none of what is read"):
        classify(other)


def test_the_message_names_no_path_of_the_server(cases: Path, tmp_path: Path) -> None:
    broken = tmp_path / "secret.mp4"
    broken.write_bytes((cases / "vid_nomoov.mp4").read_bytes())
    with pytest.raises(InvalidRequest) as caught:
        classify(broken)
    assert str(tmp_path) not in caught.value.message
