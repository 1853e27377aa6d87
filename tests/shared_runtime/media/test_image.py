"""Pictures become upright sRGB, whatever their mode, and bombs are refused before memory is spent."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from shared_runtime.media import decode_image
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import MediaCaps
from tests.cases.images import HEIGHT, QUADRANTS, WIDTH, quadrants, write_keyed_png

WHITE, GREEN = (255, 255, 255), (0, 200, 0)


def centres(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Colours in the middle of the four quadrants, `(4, 3)`."""
    height, width = pixels.shape[:2]
    rows, columns = (height // 4, height * 3 // 4), (width // 4, width * 3 // 4)
    return np.array([pixels[row, column] for row in rows for column in columns], np.int64)


@pytest.mark.parametrize("name", ["img_quad.png", "img_quad.jpg", "img_odd.png", "ref1.png", "img_gray.png"])
def test_a_plain_picture_is_what_pillow_reads(cases: Path, name: str) -> None:
    with Image.open(cases / name) as image:
        plain = np.asarray(image.convert("RGB"))
    assert np.array_equal(decode_image(cases / name), plain)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_orientation_is_applied(cases: Path, orientation: int) -> None:  # case 69
    pixels = decode_image(cases / f"img_exif{orientation}.jpg")
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(pixels.astype(int) - quadrants()).mean() < 2


@pytest.mark.parametrize("name", ["img_alpha.png", "img_alpha.webp", "img_la.png", "img_palette_trns.png"])
def test_what_is_transparent_becomes_white(cases: Path, name: str) -> None:  # case 70
    pixels = decode_image(cases / name)
    assert (pixels[:, : WIDTH // 2] == WHITE).all()
    right = (100, 100, 100) if name == "img_la.png" else GREEN
    assert (pixels[:, WIDTH // 2 :] == right).all()


@pytest.mark.parametrize(("depth", "channels"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)])
def test_a_transparent_colour_becomes_white_at_every_depth(
    tmp_path: Path, depth: int, channels: int
) -> None:  # case 70
    largest = (1 << depth) - 1
    key, other = (largest * 3 // 8,) * channels, (largest // 2 + 1,) * channels
    write_keyed_png(tmp_path / "keyed.png", depth, [key, other] * 4, key)
    pixels = decode_image(tmp_path / "keyed.png")[0]
    assert (pixels[::2] == WHITE).all()
    assert np.abs(pixels[1::2].astype(int) - 255 * other[0] // largest).max() <= 1


def test_sixteen_bits_are_scaled_and_not_clipped(cases: Path) -> None:  # case 70
    ramp = decode_image(cases / "img_gray16.png")[0, :, 0].astype(int)
    assert (ramp[0], ramp[-1]) == (0, 255)
    assert set(np.diff(ramp)) == {0, 1}


def test_cmyk_becomes_rgb(cases: Path) -> None:  # case 70
    assert np.abs(centres(decode_image(cases / "img_cmyk.jpg")) - QUADRANTS).max() <= 40


@pytest.mark.parametrize("name", ["img_anim.gif", "img_anim.webp"])
def test_an_animation_is_its_first_frame(cases: Path, name: str) -> None:  # case 70
    assert np.array_equal(decode_image(cases / name), quadrants())


def test_one_bit_is_read(cases: Path) -> None:  # case 70
    assert set(np.unique(decode_image(cases / "img_1bit.png"))) == {0, 255}


def test_a_profile_that_calls_itself_srgb_changes_nothing(cases: Path, tmp_path: Path) -> None:
    with Image.open(cases / "img_icc.png") as image:
        profile = image.info["icc_profile"].replace("swap".encode("utf-16-be"), "sRGB".encode("utf-16-be"))
    for name, icc in {"ours.png": profile, "plain.png": b""}.items():
        Image.fromarray(quadrants()).save(tmp_path / name, icc_profile=icc)
        assert np.array_equal(decode_image(tmp_path / name), quadrants())


def test_another_profile_is_applied(cases: Path) -> None:  # case 70
    red, green = centres(decode_image(cases / "img_icc.png"))[:2]
    assert green[0] > green[1]
    assert red[1] > red[0]


def test_a_broken_profile_and_broken_exif_are_left_unused(tmp_path: Path) -> None:
    path = tmp_path / "odd.png"
    Image.fromarray(quadrants()).save(path, icc_profile=b"no profile", exif=b"Exif\0\0nothing")
    assert np.array_equal(decode_image(path), quadrants())


@pytest.mark.parametrize("name", ["img_trunc.jpg", "img_trunc.png", "img_bomb.png", "img_big_header.png", "fake.png"])
def test_what_cannot_be_decoded_whole_is_refused(cases: Path, name: str) -> None:  # case 12, 67
    with pytest.raises(InvalidRequest) as caught:
        decode_image(cases / name, param="input_reference")
    assert caught.value.param == "input_reference"


def test_too_many_pixels_and_bytes_are_refused_with_the_numbers(cases: Path) -> None:
    with pytest.raises(InvalidRequest, match="1344x768"):
        decode_image(cases / "img_quad.png", caps=MediaCaps(image_pixels=1344 * 768 - 1))
    with pytest.raises(InvalidRequest, match="1343 a side"):
        decode_image(cases / "img_quad.png", caps=MediaCaps(max_side=1343))
    with pytest.raises(InvalidRequest, match="bytes"):
        decode_image(cases / "img_quad.png", caps=MediaCaps(image_bytes=100))


def test_another_kind_is_refused(cases: Path) -> None:
    with pytest.raises(InvalidRequest, match="video"):
        decode_image(cases / "vid_3f.mp4")


def test_a_jpeg_of_endless_scans_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    picture = tmp_path / "scans.jpg"
    Image.fromarray(quadrants()).save(picture, progressive=True)
    content = picture.read_bytes()
    decode_image(picture)
    last = content.rindex(b"\xff\xda")
    picture.write_bytes(content[:last] + content[last:-2] * 600 + content[-2:])
    with pytest.raises(InvalidRequest, match="scans"):
        decode_image(picture)
