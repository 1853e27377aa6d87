"""Files that pass a look at their ends and fail when decoded whole, or that never end."""

import io
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np

BOUNDARY = "------------------------6e2f0a9d7c41b853"


def fails_in_the_middle(path: Path) -> Path:
    """An MP4 of 5 s with good first and last frames and packets in between that no decoder takes."""
    whole = io.BytesIO()
    with av.open(whole, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        stream.options = {"g": "24", "bf": "0", "preset": "ultrafast"}
        for n in range(120):
            picture = np.full((96, 128, 3), 2 * n, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    data = bytearray(whole.getvalue())
    for start, length in _packets(whole.getvalue())[40:60]:
        data[start : start + length] = b"\xff" * length
    path.write_bytes(data)
    return path


def _packets(data: bytes) -> list[tuple[int, int]]:
    with av.open(io.BytesIO(data)) as container:
        return [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.pos is not None]


def endless_form(total_bytes: int) -> Iterator[bytes]:
    """The body of a multipart form whose one file is `total_bytes` zeros, in pieces of 1 MiB, without its end."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nzeros\r\n'
    head += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="input_reference"; filename="a.png"\r\n'
    yield f"{head}Content-Type: image/png\r\n\r\n".encode()
    zeros = bytes(2**20)
    for _ in range(total_bytes // len(zeros)):
        yield zeros
