"""Fixture pictures: a picture of four quadrants in every mode and format, and files that must be refused."""

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

WIDTH, HEIGHT = 1344, 768
QUADRANTS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255))
"""Colours of top left, top right, bottom left, bottom right."""
REFERENCE_COLOURS = (
    (230, 25, 75),
    (60, 180, 75),
    (0, 130, 200),
    (245, 130, 48),
    (145, 30, 180),
    (70, 240, 240),
    (240, 50, 230),
    (128, 128, 0),
    (0, 0, 128),
)
STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""EXIF orientation -> how the pixels lie in the file, so that the upright view is `img_quad`."""


def quadrants(width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    """The four quadrants, `(height, width, 3)`."""
    pixels = np.empty((height, width, 3), np.uint8)
    halves = [(slice(0, height // 2), slice(height // 2, None)), (slice(0, width // 2), slice(width // 2, None))]
    for index, colour in enumerate(QUADRANTS):
        pixels[halves[0][index // 2], halves[1][index % 2]] = colour
    return pixels


def write(folder: Path) -> None:
    """Write all pictures."""
    _plain(folder)
    _transparent(folder)
    _other_modes(folder)
    _refused(folder)


def _plain(folder: Path) -> None:
    quad = Image.fromarray(quadrants())
    quad.save(folder / "img_quad.png")
    quad.save(folder / "img_quad.jpg", quality=95)
    quad.save(folder / "img_quad.webp", lossless=True)
    for orientation, operation in STORED.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        quad.transpose(operation).save(folder / f"img_exif{orientation}.jpg", exif=exif, quality=95)
    for number, colour in enumerate(REFERENCE_COLOURS, 1):
        Image.new("RGB", (768, 768), colour).save(folder / f"ref{number}.png")


def _transparent(folder: Path) -> None:
    """Left half: transparent over magenta that must not appear. Right half: opaque."""
    rgba = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    rgba[:, : WIDTH // 2] = (255, 0, 255, 0)
    rgba[:, WIDTH // 2 :] = (0, 200, 0, 255)
    Image.fromarray(rgba).save(folder / "img_alpha.png")
    Image.fromarray(rgba).save(folder / "img_alpha.webp", lossless=True, exact=True)
    grey = np.zeros((HEIGHT, WIDTH, 2), np.uint8)
    grey[:, WIDTH // 2 :] = (100, 255)
    Image.fromarray(grey, "LA").save(folder / "img_la.png")
    palette = Image.fromarray((np.arange(WIDTH) >= WIDTH // 2).astype(np.uint8)[None].repeat(HEIGHT, 0), "P")
    palette.putpalette([255, 0, 255, 0, 200, 0])
    palette.save(folder / "img_palette_trns.png", transparency=0)


def _other_modes(folder: Path) -> None:
    quad = Image.fromarray(quadrants())
    quad.convert("1").save(folder / "img_1bit.png")
    quad.convert("L").save(folder / "img_gray.jpg")
    quad.convert("L").save(folder / "img_gray.png")
    quad.convert("CMYK").save(folder / "img_cmyk.jpg", quality=95)
    ramp = np.linspace(0, 65535, WIDTH).astype(np.uint16)[None].repeat(HEIGHT, 0)
    Image.fromarray(ramp).save(folder / "img_gray16.png")
    frames = [quad, Image.new("RGB", quad.size, (9, 9, 9))]
    frames[0].save(folder / "img_anim.gif", save_all=True, append_images=frames[1:], duration=100)
    frames[0].save(folder / "img_anim.webp", save_all=True, append_images=frames[1:], duration=100, lossless=True)
    icc = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    quad.save(folder / "img_srgb.png", icc_profile=icc)
    swapped = icc.replace(*_swapped_colorants(icc)).replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be"))
    quad.save(folder / "img_icc.png", icc_profile=swapped)


def _swapped_colorants(icc: bytes) -> tuple[bytes, bytes]:
    """Tag table entries of red and green, and the same with their names exchanged: a profile that swaps the two."""
    red, green = icc.index(b"rXYZ"), icc.index(b"gXYZ")
    first, last = min(red, green), max(red, green) + 4
    table = icc[first:last]
    return table, table.replace(b"rXYZ", b"----").replace(b"gXYZ", b"rXYZ").replace(b"----", b"gXYZ")


def _refused(folder: Path) -> None:
    Image.fromarray(quadrants(3072, 512)).save(folder / "img_6to1.png")
    Image.fromarray(quadrants(1001, 563)).save(folder / "img_odd.png")
    Image.fromarray(quadrants(16, 16)).save(folder / "img_tiny.png")
    Image.new("1", (30000, 30000)).save(folder / "img_bomb.png")
    jpeg = (folder / "img_quad.jpg").read_bytes()
    (folder / "img_trunc.jpg").write_bytes(jpeg[: len(jpeg) * 6 // 10])
    png = (folder / "img_quad.png").read_bytes()
    (folder / "img_trunc.png").write_bytes(png[: len(png) // 2])
    (folder / "img_big_header.png").write_bytes(_png_header(5761, 5761))
    (folder / "img_heic.heic").write_bytes(struct.pack(">I", 24) + b"ftypheic\0\0\0\0mif1heic" + bytes(200))
    (folder / "fake.png").write_bytes(b"this is not an image\n" * 50)
    (folder / "empty.png").write_bytes(b"")


def _png_header(width: int, height: int) -> bytes:
    """A PNG that ends after its size."""
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def write_keyed_png(path: Path, depth: int, pixels: list[tuple[int, ...]], key: tuple[int, ...]) -> None:
    """Write one row of grey or RGB pixels, `depth` bits a sample, of which those of colour `key` are transparent."""
    bits = "".join(f"{sample:0{depth}b}" for pixel in pixels for sample in pixel)
    row = int(bits, 2).to_bytes(len(bits) // 8)
    size = struct.pack(">IIBBBBB", len(pixels), 1, depth, 2 if len(key) == 3 else 0, 0, 0, 0)
    chunks = {b"IHDR": size, b"tRNS": struct.pack(f">{len(key)}H", *key), b"IDAT": zlib.compress(b"\0" + row)}
    content = b"".join(_chunk(name, data) for name, data in chunks.items())
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content + _chunk(b"IEND", b""))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
