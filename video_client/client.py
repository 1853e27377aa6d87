"""`/v1/videos` as Python calls over httpx, in the caller's own process: create, follow, download, cancel, delete."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import httpx
from pydantic import ValidationError

from shared_schema.errors import ErrorBody
from shared_schema.videos import FINAL, Video, VideoList
from video_client.events import follow

POLL_HEADER = "openai-poll-after-ms"
POLL_SECONDS = 0.5
PAUSE_S = 0.5
"""Between two tries of a patient client."""
T = TypeVar("T")


class ClientError(Exception):
    """The service refused, failed, or is not there. `str(error)` is one line for a person."""


class ServiceAway(ClientError):
    """Nobody answers, or the connection was lost."""


class StillGoing(ClientError):
    """The job has not ended in the time that was given to it."""


@dataclass(frozen=True)
class VideoRequest:
    """What to ask for: form fields by their public names, nested `extra_params`, reference files in order."""

    prompt: str
    fields: Mapping[str, str] = field(default_factory=dict)
    extra_params: Mapping[str, object] = field(default_factory=dict)
    references: Sequence[Path] = ()
    encoder_output: Path | None = None

    def form(self) -> dict[str, str]:
        """The text fields of the form."""
        extra = {"extra_params": json.dumps(dict(self.extra_params))} if self.extra_params else {}
        return {"prompt": self.prompt, **self.fields, **extra}

    def files(self) -> list[tuple[str, Path]]:
        """The file parts of the form, in request order."""
        named = [("input_references", path) for path in self.references]
        return [*named, ("encoder_output", self.encoder_output)] if self.encoder_output else named


class VideoClient:
    """One diffusion service. Every method raises `ClientError`.

    `patience_s` is how long it may be away, as in a restart, before a call that can be repeated raises `ServiceAway`.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 60.0, patience_s: float = 0.0) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        self._url = url
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def ready(self) -> str | None:
        """None when the service is ready, else why it is not."""
        try:
            answer = self._http.get("/readyz")
        except httpx.TransportError as error:
            return f"no answer: {error}"
        return None if answer.is_success else answer.text.strip()

    def create(self, request: VideoRequest, *, once: str | None = None) -> Video:
        """Upload a request. The job is queued when this returns.

        Requests with the same `once` make one job, so that with it the upload is repeated when a connection is lost.
        """
        if once is None:
            return self._create(request, {})
        return self._patiently(lambda: self._create(request, {"idempotency-key": once}))

    def _create(self, request: VideoRequest, headers: Mapping[str, str]) -> Video:
        with ExitStack() as open_files:
            files = []
            for name, path in request.files():
                try:
                    files.append((name, (path.name, open_files.enter_context(path.open("rb")))))
                except OSError as error:
                    raise ClientError(f"cannot read {path}: {error.strerror}") from error
            return self._video(
                self._send("POST", "/v1/videos", data=request.form(), files=files or None, headers=headers)
            )

    def get(self, video_id: str) -> Video:
        """The job as it is now."""
        return self._video(self._patiently(lambda: self._send("GET", f"/v1/videos/{video_id}")))

    def page(self, *, limit: int = 20, after: str | None = None) -> VideoList:
        """The newest jobs, or those that follow `after`."""
        params = {"limit": str(limit), **({"after": after} if after else {})}
        return VideoList.model_validate_json(self._send("GET", "/v1/videos", params=params).content)

    def cancel(self, video_id: str) -> Video:
        """Stop a job and keep its record."""
        return self._video(self._patiently(lambda: self._send("POST", f"/v1/videos/{video_id}/cancel")))

    def delete(self, video_id: str) -> None:
        """Stop a job and remove record and file."""
        self._send("DELETE", f"/v1/videos/{video_id}")

    def wait(
        self, video_id: str, *, timeout_s: float, on_change: Callable[[Video], None] = lambda video: None
    ) -> Video:
        """Follow the job's events until it is completed, failed or cancelled; poll a service that has none.

        `on_change` sees every change that the service tells, the past ones too, and at last the whole job.
        """
        end = time.monotonic() + timeout_s
        video = self.get(video_id)
        if video.status == "queued":
            on_change(video)
        if video.status not in FINAL:
            with self._mapped():
                for event in follow(self._http, video_id, end):
                    now = {"status": event.status, "phase": event.phase, "progress": event.progress}
                    # What a fresh job says first is shown already, and there with its place in the queue.
                    if not event.final and now != video.model_dump(include=set(now)):
                        video = video.model_copy(update={**now, "queue_position": None})
                        on_change(video)
        return self._poll(video_id, end, timeout_s, on_change)

    def _poll(self, video_id: str, end: float, timeout_s: float, on_change: Callable[[Video], None]) -> Video:
        while True:
            answer = self._patiently(lambda: self._send("GET", f"/v1/videos/{video_id}"))
            video = self._video(answer)
            on_change(video)
            if video.status in FINAL:
                return video
            if time.monotonic() > end:
                raise StillGoing(f"{video_id} is still {video.status} after {timeout_s:g} s")
            time.sleep(min(float(answer.headers.get(POLL_HEADER, POLL_SECONDS * 1000)) / 1000, POLL_SECONDS))

    def download(self, video_id: str, path: Path) -> int:
        """Write the MP4 to `path` and say how many bytes it has. A broken download goes on where it broke, or leaves
        no file.
        """
        part = path.with_name(f"{path.name}.part")
        try:
            with part.open("wb") as target:
                self._patiently(lambda: self._fetch(f"/v1/videos/{video_id}/content?redirect=false", target))
            part.replace(path)
        except OSError as error:
            raise ClientError(f"cannot write {path}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        return path.stat().st_size

    def _fetch(self, path: str, target: BinaryIO) -> None:
        """Add to `target` what it has not got of the content."""
        there = target.tell()
        headers = {"range": f"bytes={there}-"} if there else {}
        with self._stream(path, headers) as answer:
            if there and answer.status_code != 206:
                target.truncate(0)
                target.seek(0)
            for chunk in answer.iter_bytes():
                target.write(chunk)

    def _patiently(self, call: Callable[[], T]) -> T:
        """The call's result, once somebody answers."""
        end = time.monotonic() + self._patience_s
        while True:
            try:
                return call()
            except ServiceAway:
                if time.monotonic() >= end:
                    raise
            time.sleep(min(PAUSE_S, max(end - time.monotonic(), 0.0)))

    def _send(self, method: str, path: str, **options: object) -> httpx.Response:
        with self._mapped():
            answer = self._http.request(method, path, **options)  # type: ignore[arg-type]
        return _checked(answer)

    @contextmanager
    def _stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        with self._mapped(), self._http.stream("GET", path, headers=headers) as answer:
            if not answer.is_success:
                answer.read()
            yield _checked(answer)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ServiceAway(f"no service at {self._url}: {error}; start one with `make serve`") from error
        except httpx.HTTPError as error:
            raise ServiceAway(f"{self._url}: {type(error).__name__} {error}") from error

    def _video(self, answer: httpx.Response) -> Video:
        try:
            return Video.model_validate_json(answer.content)
        except ValidationError as error:
            raise ClientError(f"{self._url} does not answer as a video service: {error}") from error


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        detail = ErrorBody.model_validate_json(answer.content).error
    except ValidationError as error:
        raise ClientError(f"{answer.status_code}: {answer.text[:200]}") from error
    where = f" ({detail.param})" if detail.param else ""
    raise ClientError(f"{answer.status_code} {detail.code}{where}: {detail.message}")
