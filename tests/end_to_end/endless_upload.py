"""An upload that never ends, over a plain socket: what a client library would not let a test do."""

import select
import socket
from collections.abc import Iterator

BOUNDARY = "------------------------6e2f0a9d7c41b853"


def upload(port: int, total_bytes: int, *, chunked: bool) -> tuple[int, bytes]:
    """Send a form whose one file is `total_bytes` zeros until the server answers; (bytes sent, the answer's start)."""
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {total_bytes}"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(_head(length))
        sent = _send_until_answered(connection, total_bytes, chunked)
        try:
            return sent, connection.recv(65536)
        except ConnectionResetError:
            return sent, b""


def _head(length: str) -> bytes:
    lines = ["POST /v1/videos HTTP/1.1", "Host: h3", f"Content-Type: multipart/form-data; boundary={BOUNDARY}", length]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _send_until_answered(connection: socket.socket, total_bytes: int, chunked: bool) -> int:
    sent = 0
    for piece in _pieces(total_bytes):
        if select.select([connection], [], [], 0)[0]:
            break
        try:
            connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if chunked else piece)
        except (BrokenPipeError, ConnectionResetError):
            break
        sent += len(piece)
    return sent


def _pieces(total_bytes: int) -> Iterator[bytes]:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nzeros\r\n'
    head += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="input_reference"; filename="a.png"\r\n'
    yield f"{head}Content-Type: image/png\r\n\r\n".encode()
    zeros = bytes(2**20)
    for _ in range(total_bytes // len(zeros)):
        yield zeros
