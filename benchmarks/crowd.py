"""Clients that poll one job in an open loop, and event streams of it, in a process of their own.

    python -m benchmarks.crowd URL JOB --clients 1000 --every 5 --streams 200

Says `ready` once the streams are open, polls until its input ends, then prints one line of JSON. A poll's time begins
when it was due, not when it was sent: a server that falls behind cannot slow its clients down to hide it.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CLOSED = (OSError, asyncio.IncompleteReadError)


@dataclass
class Tally:
    """What the crowd saw."""

    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    reconnected: int = 0
    events: int = 0
    streams: int = 0
    """Streams that were opened."""

    def as_json(self) -> str:
        """One line."""
        counts = {"reconnected": self.reconnected, "events": self.events, "streams": self.streams}
        return json.dumps({"latencies_ms": self.latencies_ms, "statuses": dict(self.statuses), **counts})


@dataclass(frozen=True)
class Target:
    """Which job of which server."""

    host: str
    port: int
    job: str

    def request(self, path: str = "", accept: str = "application/json") -> bytes:
        """A GET of the job."""
        lines = [f"GET /v1/videos/{self.job}{path} HTTP/1.1", f"host: {self.host}:{self.port}", f"accept: {accept}"]
        return "\r\n".join([*lines, "", ""]).encode()


class Crowd:
    """All clients in one event loop, each on a connection of its own that stays open."""

    def __init__(self, target: Target, every_s: float) -> None:
        self.tally = Tally()
        self._target = target
        self._every_s = every_s

    async def poll(self, phase: float) -> None:
        """One client: a poll every `every_s`, the first one `phase` of that from now; until cancelled."""
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        due = loop.time() + phase * self._every_s
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            try:
                connection = await self._ask(connection)
                self.tally.latencies_ms.append(round((loop.time() - due) * 1e3, 3))
            except CLOSED as error:
                self.tally.statuses[type(error).__name__] += 1
                connection = None
            due += self._every_s

    async def listen(self) -> None:
        """One event stream, until it ends or is cancelled."""
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            writer.write(self._target.request("/events", "text/event-stream"))
            status, _ = await _head(reader)
            self.tally.statuses[f"stream {status}"] += 1
            self.tally.streams += status == "200"
            with suppress(*CLOSED):
                rest = b""
                while some := await reader.read(1 << 16):
                    self.tally.events += (rest + some).count(b"\ndata:")
                    rest = (rest + some)[-5:]
        finally:
            writer.close()

    async def _ask(self, connection: Connection | None) -> Connection:
        """Send one GET, on a new connection where the server has closed the old one, and read the whole answer."""
        if connection is not None:
            with suppress(*CLOSED):
                return await self._exchange(connection)
            self.tally.reconnected += 1
        return await self._exchange(await asyncio.open_connection(self._target.host, self._target.port))

    async def _exchange(self, connection: Connection) -> Connection:
        reader, writer = connection
        writer.write(self._target.request())
        status, length = await _head(reader)
        await reader.readexactly(length)
        self.tally.statuses[status] += 1
        return connection


async def _head(reader: asyncio.StreamReader) -> tuple[str, int]:
    """Status and content length of an answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    lengths = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
    return lines[0].split(" ")[1], int(lengths[0]) if lengths else 0


async def run(target: Target, clients: int, every_s: float, streams: int) -> Tally:
    """Poll and listen until standard input ends."""
    crowd = Crowd(target, every_s)
    tasks = [asyncio.create_task(crowd.listen()) for _ in range(streams)]
    while sum(crowd.tally.statuses.values()) < streams and not any(task.done() for task in tasks):
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    phases = [(n + random.random()) / max(clients, 1) for n in range(clients)]
    tasks += [asyncio.create_task(crowd.poll(phase)) for phase in phases]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return crowd.tally


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="benchmarks.crowd")
    parser.add_argument("url")
    parser.add_argument("job")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two polls of one client")
    parser.add_argument("--streams", type=int, default=0)
    options = parser.parse_args(arguments)
    address = urlsplit(options.url)
    target = Target(address.hostname or "127.0.0.1", address.port or 80, options.job)
    print(asyncio.run(run(target, options.clients, options.every, options.streams)).as_json(), flush=True)


if __name__ == "__main__":
    main()
