"""The event stream of one job as an iterator, over as many connections as it takes. Runs in the caller's process."""

import time
from collections.abc import Iterator

import httpx
from httpx_sse import EventSource, connect_sse
from pydantic import ValidationError

from shared_schema.videos import VideoEvent

RECONNECT_S = 1.0
SILENCE_S = 45.0
"""A live stream says something every 15 s; after this long its connection counts as lost."""
AWAY_S = 60.0
"""How long a service may be away, as in a restart, before we give up on its stream."""
CONNECT_S = 10.0


def follow(http: httpx.Client, video_id: str, end: float) -> Iterator[VideoEvent]:
    """Every change of the job until its last one, until the monotonic time `end`, or until the service shows that it
    has no such stream. A lost connection goes on where it was lost.

    Raises:
        httpx.TransportError: nobody has answered for `AWAY_S` seconds.
    """
    last, heard = "", time.monotonic()
    while (now := time.monotonic()) < end:
        connected = False
        timeout = httpx.Timeout(CONNECT_S, read=min(SILENCE_S, end - now))
        headers = {"Last-Event-ID": last} if last else {}
        try:
            with connect_sse(http, "GET", f"/v1/videos/{video_id}/events", headers=headers, timeout=timeout) as source:
                connected = True
                if not _is_away(source) and not _is_stream(source):
                    return
                for sent in source.iter_sse() if _is_stream(source) else ():
                    last = sent.id or last
                    if not sent.data:
                        continue
                    event = _event(sent.data)
                    if event is None:
                        return
                    yield event
                    if event.final:
                        return
        except httpx.TransportError:
            if not connected and time.monotonic() - heard > AWAY_S:
                raise
        if connected:
            heard = time.monotonic()
        time.sleep(max(0.0, min(RECONNECT_S, end - time.monotonic())))


def _event(data: str) -> VideoEvent | None:
    """The change, or None if this stream tells something else."""
    try:
        return VideoEvent.model_validate_json(data)
    except ValidationError:
        return None


def _is_stream(source: EventSource) -> bool:
    kind = source.response.headers.get("content-type", "")
    return source.response.status_code == 200 and kind.startswith("text/event-stream")


def _is_away(source: EventSource) -> bool:
    return source.response.status_code in (429, 502, 503, 504)
