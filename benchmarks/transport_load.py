"""What is sent in the transport's benchmark: flat payloads of one size, and the payload of a real ref2va request."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from shared_runtime.transport.codec import checksum
from shared_schema.encoder_output import AUDIO, LAYOUT, ROLES, TEXT, VISUAL, EncoderOutput, Manifest
from shared_schema.layout import Block, BlockKind, Layout
from shared_schema.tasks import Task

MIB = 2**20
TEXT_DIM = 5120
_IMAGE_TOKENS, _VIDEO_TOKENS, _PROMPT_TOKENS = 64 * 64, 6 * (24 * 42), 200
REF2VA = Layout(
    Task.REF2VA,
    768,
    1344,
    124,
    (Block(BlockKind.IMAGE, 0, 0, 128, 128), Block(BlockKind.VIDEO, 207, 37, 48, 84), Block(BlockKind.AUDIO, 120)),
)
"""A picture of 2048 x 2048, five seconds of video with sound, three seconds of voice."""


@dataclass(frozen=True)
class Load:
    """Bytes to send, and where in them each tensor is."""

    name: str
    data: memoryview
    tensors: tuple[tuple[str, int, int], ...]
    """Name, first byte, bytes."""
    manifest: Manifest | None = None

    @property
    def nbytes(self) -> int:
        """Of everything."""
        return self.data.nbytes

    def renew(self, turn: int) -> str:
        """New content for every turn, so that nothing left over from the last one can pass; its checksum."""
        if self.manifest is None:
            self.data[::4096] = bytes([turn % 256]) * len(range(0, self.nbytes, 4096))
        else:
            spec = self.manifest.slot(TEXT)
            self.data[spec.offset : spec.offset + spec.nbytes : 4096] = bytes([turn % 100]) * len(
                range(0, spec.nbytes, 4096)
            )
        return checksum(self.data)


def flat(mib: int) -> Load:
    """One tensor of so many MiB."""
    data = memoryview(bytearray(os.urandom(MIB) * mib))
    return Load(f"{mib} MiB", data, (("data", 0, data.nbytes),))


def ref2va() -> Load:
    """The slots of a ref2va request at the released model's sizes."""
    tokens = _IMAGE_TOKENS + _VIDEO_TOKENS + _PROMPT_TOKENS
    shapes = {
        TEXT: (tokens, TEXT_DIM),
        ROLES: (tokens,),
        VISUAL: (REF2VA.visual_rows, 96),
        AUDIO: (REF2VA.audio_rows, 32),
    }
    manifest = Manifest.plan(shapes, REF2VA)
    data = memoryview(bytearray(manifest.nbytes))
    for spec in manifest.slots:
        if spec.name == LAYOUT:
            words = b"".join(word.to_bytes(8, "little", signed=True) for word in manifest.layout)
            data[spec.offset : spec.offset + spec.nbytes] = words
    EncoderOutput(manifest=manifest, data=data)
    tensors = tuple((spec.name, spec.offset, spec.nbytes) for spec in manifest.slots)
    return Load(f"ref2va, {manifest.nbytes / MIB:.0f} MiB", data, tensors, manifest)


def loads(mib: list[int]) -> Iterator[Load]:
    """All of them, one at a time: each is gone before the next is made."""
    for size in mib:
        yield flat(size)
    yield ref2va()
