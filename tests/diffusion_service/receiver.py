"""A receiver of webhooks: a real HTTP server in a thread, which answers what a test says and judges signatures."""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from openai import OpenAI

SECRET = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"


@dataclass(frozen=True)
class Message:
    """One request as it came."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def id(self) -> str:
        """By which receivers know a message that comes twice."""
        return self.headers["webhook-id"]

    def event(self) -> dict[str, Any]:
        """What it says, once its signature has been checked as a receiver would."""
        OpenAI(api_key="any").webhooks.verify_signature(self.body, dict(self.headers), secret=SECRET)
        event: dict[str, Any] = json.loads(self.body)
        return event


@dataclass
class Receiver:
    """What came, and the status that is answered to each: in order, the last one for ever. 0 is never answered."""

    url: str
    statuses: list[int] = field(default_factory=lambda: [204])
    location: str | None = None
    messages: list[Message] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def status(self) -> int:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """Three services dial with 16 connections each; the five of the library would turn some of them away."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver that lives as long as the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            receiver.messages.append(Message(self.path, headers, body))
            status = receiver.status()
            if status == 0:
                receiver.let_go.wait(30)
                return
            self.send_response(status)
            if receiver.location:
                self.send_header("location", receiver.location)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with _Server(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}/hook")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.let_go.set()
            server.shutdown()
            thread.join()
