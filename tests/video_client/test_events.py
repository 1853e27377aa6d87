"""Waiting for a job by its events: every change once, over dropped connections, and by polls where there are none."""

from collections.abc import Callable

import pytest

from shared_schema.videos import Video
from tests.video_client.conftest import Answer, Service, error, event, events, video
from video_client import events as events_module
from video_client.client import ClientError, VideoClient
from video_client.pair import free_ports

ID = video("queued").id
GET, EVENTS = f"GET /v1/videos/{ID}", f"GET /v1/videos/{ID}/events"
Waited = tuple[Video, list[tuple[str, str | None, int]]]


@pytest.fixture
def wait(service: Service, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Waited]:
    """Wait for the job and say what was seen of it."""
    monkeypatch.setattr(events_module, "RECONNECT_S", 0.01)

    def waited() -> Waited:
        seen: list[tuple[str, str | None, int]] = []
        with VideoClient(service.url) as client:
            final = client.wait(ID, timeout_s=5, on_change=lambda v: seen.append((v.status, v.phase, v.progress)))
        return final, seen

    return waited


def test_every_change_is_seen_without_polling(service: Service, wait: Callable[[], Waited]) -> None:
    service.will(GET, video("queued", phase="queued", queue_position=2), video("completed", 100))
    service.will(
        EVENTS,
        events(
            event("queued", "queued"),
            event("in_progress", "encoding", 3),
            event("in_progress", "denoising", 40),
            event("completed", None, 100),
        ),
    )
    final, seen = wait()
    assert final.status == "completed"
    assert seen == [
        ("queued", "queued", 0),
        ("in_progress", "encoding", 3),
        ("in_progress", "denoising", 40),
        ("completed", None, 100),
    ]
    assert [request for request, _ in service.asked] == [GET, EVENTS, GET]


def test_a_dropped_connection_goes_on_where_it_was_lost(service: Service, wait: Callable[[], Waited]) -> None:
    service.will(GET, video("in_progress", 1), video("completed", 100))
    service.will(
        EVENTS,
        events(event("in_progress", "encoding", 3), event("in_progress", "denoising", 20), cut=True),
        Answer(b"", 503),
        events(event("in_progress", "denoising", 50), start=3),
        events(event("completed", None, 100), start=4),
    )
    _, seen = wait()
    assert [progress for _, _, progress in seen] == [3, 20, 50, 100]
    assert service.last_event_ids == [None, "2", "2", "3"]


def test_a_stream_that_breaks_after_long_is_connected_again(
    service: Service, wait: Callable[[], Waited], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "AWAY_S", 0.0)
    service.will(GET, video("in_progress", 1), video("completed", 100))
    service.will(
        EVENTS,
        events(event("in_progress", "denoising", 20), cut=True),
        events(event("completed", None, 100), start=2),
    )
    assert wait()[0].status == "completed"


@pytest.mark.parametrize(
    "answer", [error(404, "there is no such route"), Answer(b"{}"), Answer(b"", 204), Answer(b"", 405)]
)
def test_a_service_without_events_is_polled(service: Service, wait: Callable[[], Waited], answer: Answer) -> None:
    again = Answer(video("in_progress", 50).model_dump_json().encode(), headers={"openai-poll-after-ms": "1"})
    service.will(GET, again, again, again, video("completed", 100))
    service.will(EVENTS, answer)
    _, seen = wait()
    assert [progress for _, _, progress in seen] == [50, 50, 100]
    assert [request for request, _ in service.asked].count(EVENTS) == 1


def test_a_finished_job_needs_no_events(service: Service, wait: Callable[[], Waited]) -> None:
    service.will(GET, video("failed", 40))
    assert wait()[1] == [("failed", None, 40)]
    assert EVENTS not in [request for request, _ in service.asked]


def test_a_deleted_job_is_an_error_that_says_so(service: Service, wait: Callable[[], Waited]) -> None:
    service.will(GET, video("in_progress", 1), error(404, "there is no video"))
    gone = f'data: {{"type":"video.deleted","video_id":"{ID}"}}\n\n'.encode()
    service.will(EVENTS, Answer(gone, headers={"content-type": "text/event-stream"}))
    with pytest.raises(ClientError, match="there is no video"):
        wait()


def test_a_service_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "RECONNECT_S", 0.01)
    monkeypatch.setattr(events_module, "AWAY_S", 0.1)
    [port] = free_ports(1)
    with VideoClient(f"http://127.0.0.1:{port}") as client:
        monkeypatch.setattr(client, "get", lambda _: video("in_progress", 1))
        with pytest.raises(ClientError, match="no service at"):
            client.wait(ID, timeout_s=5)
