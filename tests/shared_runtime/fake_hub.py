"""A small Hugging Face hub over HTTP on this machine: one repository with the released tree, and a log of requests."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPOSITORY = "MiniMaxAI/MiniMax-H3"
COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """What the hub serves and what it was asked for."""

    files: dict[str, bytes]
    gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the hub claims in place of the true ones."""
    requests: list[str] = field(default_factory=list)

    @property
    def fetched(self) -> set[str]:
        """Paths whose content was sent."""
        return {request.removeprefix("GET ") for request in self.requests if not request.startswith(("HEAD", "GET /"))}

    def size(self, path: str) -> int:
        return self.sizes.get(path, len(self.files[path]))

    def digest(self, path: str) -> str:
        """Of content and path: a client may not take one file for another of equal content."""
        return hashlib.sha256(path.encode() + self.files[path]).hexdigest()

    def tree(self) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for path in sorted(self.files):
            entry: dict[str, object] = {"type": "file", "path": path, "size": self.size(path), "oid": self.digest(path)}
            if path.endswith(".safetensors"):
                entry["lfs"] = {"oid": self.digest(path), "size": self.size(path), "pointerSize": 134}
            entries.append(entry)
        return entries


def released_tree(tiny: Path) -> dict[str, bytes]:
    """The tiny checkpoint as the hub's repository would hold it, with the folders of the other layout beside it."""
    files = {str(p.relative_to(tiny)): p.read_bytes() for p in tiny.rglob("*") if p.is_file()}
    for folder in ("FL2VA", "Ref2VA"):
        files[f"{folder}/model_index.json"] = b"{}"
        files[f"{folder}/transformer/config.json"] = b"{}"
        files[f"{folder}/transformer/model.safetensors"] = b"other layout"
    return {**files, "README.md": b"# MiniMax-H3", ".gitattributes": b"", "vae/picture.png": b"png"}


class _Handler(BaseHTTPRequestHandler):
    server: "HubServer"
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        info, resolve = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/{COMMIT}/"
        file = path.removeprefix(resolve)
        hub.requests.append(f"{self.command} {file}")
        if hub.gated:
            self.refuse(403, "GatedRepo")
        elif path.startswith(f"{info}/tree/"):
            self.send_json(hub.tree())
        elif path in (info, f"{info}/revision/main", f"{info}/revision/{COMMIT}"):
            self.send_json({"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": f} for f in hub.files]})
        elif path.startswith(f"{info}/revision/"):
            self.refuse(404, "RevisionNotFound")
        elif file in hub.files:
            self.send_file(file)
        else:
            self.refuse(404, "EntryNotFound" if path.startswith(resolve) else "RepoNotFound")

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def send_json(self, content: object) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send_file(self, file: str) -> None:
        hub = self.server.hub
        headers = {"ETag": f'"{hub.digest(file)}"', "X-Repo-Commit": COMMIT}
        if file in hub.sizes:
            headers["X-Linked-Size"] = str(hub.sizes[file])
            headers["X-Linked-Etag"] = headers["ETag"]
        self.send(200, hub.files[file], headers)

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The hub's own log is `requests`."""


class HubServer(ThreadingHTTPServer):
    """Serves `hub`, which a test may replace."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = FakeHub({})
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving() -> Iterator[HubServer]:
    """A hub on a free port of this machine."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
