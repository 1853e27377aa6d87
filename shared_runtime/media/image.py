"""Pictures: any mode that Pillow opens -> upright sRGB pixels. Runs in API processes' threads and in encoder ranks."""

import io
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from shared_runtime.media.boundary import DEFAULT_CAPS, check_bytes, decoding
from shared_runtime.media.formats import PNG, expect
from shared_schema.errors import InvalidRequest
from shared_schema.tasks import MediaCaps

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what makes the picture upright."""
_PROFILE_MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""Colour space of an ICC profile -> mode of the pixels that it describes."""
_BACKGROUND = (255, 255, 255, 255)
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_PNG_BITS_AT = 24
"""Where a PNG's header has the bits of a sample."""
MAX_SCANS = 500
"""Of a JPEG. Each may be a few bytes and makes the decoder go through all pixels; real ones have some ten."""


def decode_image(path: Path, *, caps: MediaCaps = DEFAULT_CAPS, param: str | None = None) -> NDArray[np.uint8]:
    """Decode a picture: `(height, width, 3)` uint8, upright, sRGB, alpha composited on white; first frame only.

    Raises:
        InvalidRequest: not an image, too many bytes or pixels, or it cannot be decoded whole.
    """
    found = expect(path, "image", param)
    check_bytes(path, caps.image_bytes, "image", param)
    _check_scans(path.read_bytes(), param)
    with decoding("image", param), Image.open(path, formats=found.readers) as image:
        _check_pixels(image.size, caps, param)
        image.load()
        if found is PNG:
            _scale_transparent(image, _sample_bits(path))
        operation = _UPRIGHT.get(_orientation(image))
        pixels = _to_srgb(image)
        return np.array(pixels if operation is None else pixels.transpose(operation))


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) where there is none; damaged EXIF data is left unused, as browsers do."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except (LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error):
        return 1


def _check_pixels(size: tuple[int, int], caps: MediaCaps, param: str | None) -> None:
    width, height = size
    if width * height > caps.image_pixels or max(size) > caps.max_side:
        limits = f"at most {caps.image_pixels} pixels and {caps.max_side} a side are read"
        raise InvalidRequest(f"the image is {width}x{height}, {limits}", param=param)


def _check_scans(content: bytes, param: str | None) -> None:
    # The marker cannot be part of what is coded: a 0xff in it is followed by 0.
    if content.startswith(_JPEG) and content.count(_SCAN) > MAX_SCANS:
        raise InvalidRequest(f"the image is a JPEG of more than {MAX_SCANS} scans", param=param)


def _sample_bits(path: Path) -> int:
    with path.open("rb") as file:
        return file.read(_PNG_BITS_AT + 1)[_PNG_BITS_AT]


def _scale_transparent(image: Image.Image, bits: int) -> None:
    """Bring a PNG's transparent colour to 8 bits, as Pillow does with samples: of 16 it keeps the upper ones."""

    def scaled(sample: int) -> int:
        return sample >> 8 if bits == 16 else sample * 255 // ((1 << bits) - 1)

    match image.mode, image.info.get("transparency"):
        case "L", int(grey):
            image.info["transparency"] = scaled(grey)
        case "RGB", tuple(colour):
            image.info["transparency"] = tuple(scaled(sample) for sample in colour)


def _to_srgb(image: Image.Image) -> Image.Image:
    """RGB pixels in sRGB; a profile that is unreadable or of another colour space is left unused, as browsers do."""
    profile = image.info.get("icc_profile")
    opaque = _opaque(image)
    if profile:
        converted = _through_profile(opaque, profile)
        if converted is not None:
            return converted
    return opaque.convert("RGB")


def _opaque(image: Image.Image) -> Image.Image:
    """The picture without alpha, palette or 16-bit samples: mode RGB, L or CMYK (or one that converts plainly)."""
    if image.mode.startswith("I"):
        return _eight_bits(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, _BACKGROUND), layer).convert("RGB")
    return image.convert("RGB") if image.mode == "P" else image


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bits; one value may be transparent."""
    wide = np.asarray(image).astype(np.int64)
    grey = ((np.clip(wide, 0, 65535) * 255 + 32767) // 65535).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[wide == clear] = 255
    return Image.fromarray(grey)


def _through_profile(image: Image.Image, icc: bytes) -> Image.Image | None:
    """`image` from its profile to sRGB, or None where the profile is sRGB already or does not fit."""
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        name = ImageCms.getProfileDescription(profile)
        if "srgb" in name.lower() or _PROFILE_MODES.get(profile.profile.xcolor_space) != image.mode:
            return None
        return ImageCms.profileToProfile(image, profile, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
