"""A service as the client sees it: plain HTTP on a free port, answers laid out beforehand."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared_schema.videos import Phase, Video, VideoError, VideoEvent, VideoStatus


def video(status: VideoStatus, progress: int = 0, **changes: object) -> Video:
    """A job in that state."""
    shown: dict[str, object] = {
        "id": "video_" + "0" * 32,
        "model": "tiny",
        "prompt": "a red ball",
        "status": status,
        "progress": progress,
        "phase": None if status in ("completed", "failed", "cancelled") else "denoising",
        "created_at": 1,
        "size": "128x64",
        "seconds": "4.458",
        "num_frames": 107,
        "fps": 24,
        "duration_s": 107 / 24,
        "task": "t2va",
        "seed": 1,
        "num_inference_steps": 5,
        "forwards": 4,
        "flow_shift": 12.0,
        "audio_flow_shift": 3.0,
        **changes,
    }
    return Video.model_validate(shown)


FAILED = video("failed", 40, error=VideoError(code="worker_died", message="a rank left"))


@dataclass
class Answer:
    """One answer of the service."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Service:
    """Answers by `METHOD path`, the last one repeated; keeps what was asked."""

    url: str
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    last_event_ids: list[str | None] = field(default_factory=list)
    """Of each request for events."""
    ranges: list[str | None] = field(default_factory=list)
    """Of each request for content."""
    idempotency_keys: list[str | None] = field(default_factory=list)
    """Of each POST."""
    authorizations: set[str | None] = field(default_factory=set)

    def will(self, request: str, *answers: Answer | Video) -> None:
        """Answer `request` with these, in order."""
        self.answers[request] = [
            Answer(answer.model_dump_json().encode()) if isinstance(answer, Video) else answer for answer in answers
        ]


def error(status: int, message: str, param: str | None = None) -> Answer:
    """An error body of the public API."""
    detail = {"message": message, "type": "invalid_request_error", "param": param, "code": "invalid_request"}
    return Answer(json.dumps({"error": detail}).encode(), status)


def events(*changes: VideoEvent, start: int = 1, cut: bool = False) -> Answer:
    """An event stream that tells these; one that is `cut` breaks after them."""
    body = b"retry: 1000\n\n: still here\n\n"
    for number, change in enumerate(changes, start):
        body += f"id: {number}\ndata: {change.model_dump_json()}\n\n".encode()
    length = {"content-length": str(len(body) + 1)} if cut else {}
    return Answer(body, headers={"content-type": "text/event-stream; charset=utf-8", **length})


def event(status: VideoStatus, phase: Phase | None = None, progress: int = 0) -> VideoEvent:
    """A change of the job of `video`."""
    kind: dict[str, object] = {"type": f"video.{status}", "video_id": "video_" + "0" * 32, "at": 1.0}
    return VideoEvent.model_validate({**kind, "status": status, "phase": phase, "progress": progress})


@pytest.fixture
def service() -> Iterator[Service]:
    """A live service on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = self.path.removesuffix("?redirect=false")
            request = f"{self.command} {path}"
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            known.asked.append((request, body))
            known.authorizations.add(self.headers.get("authorization"))
            if self.path.endswith("/events"):
                known.last_event_ids.append(self.headers.get("last-event-id"))
            if path.endswith("/content"):
                assert path != self.path, "our client reads no clip from elsewhere"
                known.ranges.append(self.headers.get("range"))
            if self.command == "POST":
                known.idempotency_keys.append(self.headers.get("idempotency-key"))
            answers = known.answers.get(request) or [error(404, f"no route {request}")]
            chosen = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(chosen.status)
            for name, value in {"content-length": str(len(chosen.body)), **chosen.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(chosen.body)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        known = Service(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield known
        server.shutdown()
        thread.join()
