"""A plain HTTP server on loopback that answers what a test says and counts who came."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Listening:
    """What came, and what is answered by path: raw bytes of the whole answer. A path without one is never answered."""

    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    answers: dict[str, bytes] = field(default_factory=dict)
    first_come: int = 0
    """So many connections are there before any is answered."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            while self.connections < self.first_come:
                await asyncio.sleep(0.01)
            path = head.split(b" ")[1].decode()
            if path == "/slow":
                await _drip(writer)
            if path in self.answers:
                writer.write(self.answers[path])
                await writer.drain()
            else:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


def ok(body: bytes, *headers: str) -> bytes:
    """An answer with that body."""
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def moved(to: str, status: int = 302) -> bytes:
    """A redirect."""
    return f"HTTP/1.1 {status} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[Listening]:
    """A server that lives as long as the block."""
    one = Listening()
    server = await asyncio.start_server(one.answer, "127.0.0.1", 0, ssl=tls)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        await asyncio.sleep(0)
