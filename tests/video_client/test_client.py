from pathlib import Path

import pytest

from shared_schema.videos import VideoList
from tests.video_client.conftest import Answer, Service, error, video
from video_client.client import ClientError, VideoClient, VideoRequest
from video_client.pair import free_ports

ID = video("queued").id


def test_references_are_sent_in_order_with_their_names(service: Service, tmp_path: Path) -> None:
    service.will("POST /v1/videos", video("queued"))
    paths = [tmp_path / name for name in ("b.png", "a.wav")]
    for path in paths:
        path.write_bytes(path.name.encode() * 3)
    with VideoClient(service.url) as client:
        made = client.create(VideoRequest("hi", {"seconds": "4"}, {"task": "ref2va"}, paths))
    [(_, body)] = service.asked
    parts = [part for part in body.split(b"\r\n") if part]
    assert made.id == ID
    assert body.index(b'filename="b.png"') < body.index(b'filename="a.wav"')
    assert body.count(b'name="input_references"') == 2
    assert {b"hi", b"4", b'{"task": "ref2va"}', b"b.png" * 3, b"a.wav" * 3} <= set(parts)


def test_a_request_without_files_needs_no_multipart(service: Service) -> None:
    service.will("POST /v1/videos", video("queued"))
    with VideoClient(service.url) as client:
        client.create(VideoRequest("a b"))
    assert service.asked == [("POST /v1/videos", b"prompt=a+b")]


def test_an_own_encoding_is_sent_as_a_file(service: Service, tmp_path: Path) -> None:
    service.will("POST /v1/videos", video("queued"))
    path = tmp_path / "encoding.safetensors"
    path.write_bytes(b"payload")
    with VideoClient(service.url) as client:
        client.create(VideoRequest("", encoder_output=path))
    assert b'name="encoder_output"; filename="encoding.safetensors"' in service.asked[0][1]


def test_a_file_that_is_not_there_is_named_before_anything_is_sent(service: Service, tmp_path: Path) -> None:
    with VideoClient(service.url) as client, pytest.raises(ClientError, match=r"missing\.png: No such file"):
        client.create(VideoRequest("hi", references=[tmp_path / "missing.png"]))
    assert service.asked == []


def test_wait_shows_every_answer_and_returns_the_final_one(service: Service) -> None:
    again = Answer(video("in_progress", 50).model_dump_json().encode(), headers={"openai-poll-after-ms": "1"})
    service.will(f"GET /v1/videos/{ID}", again, again, again, video("completed", 100))
    seen: list[int] = []
    with VideoClient(service.url) as client:
        final = client.wait(ID, timeout_s=5, on_change=lambda shown: seen.append(shown.progress))
    assert (final.status, seen) == ("completed", [50, 50, 100])


def test_wait_gives_up_at_its_limit(service: Service) -> None:
    service.will(f"GET /v1/videos/{ID}", video("queued"))
    with VideoClient(service.url) as client, pytest.raises(ClientError, match="still queued after 0 s"):
        client.wait(ID, timeout_s=0)


def test_download_writes_the_file_whole(service: Service, tmp_path: Path) -> None:
    service.will(f"GET /v1/videos/{ID}/content", Answer(b"mp4" * 1000))
    with VideoClient(service.url) as client:
        assert client.download(ID, tmp_path / "clip.mp4") == 3000
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_a_broken_download_leaves_no_file(service: Service, tmp_path: Path) -> None:
    service.will(f"GET /v1/videos/{ID}/content", Answer(b"mp4", headers={"content-length": "10"}))
    with VideoClient(service.url, timeout_s=1) as client, pytest.raises(ClientError):
        client.download(ID, tmp_path / "clip.mp4")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_download_says_why(service: Service, tmp_path: Path) -> None:
    service.will(f"GET /v1/videos/{ID}/content", error(404, "not completed yet"))
    with VideoClient(service.url) as client, pytest.raises(ClientError, match="404 invalid_request: not completed yet"):
        client.download(ID, tmp_path / "clip.mp4")


def test_an_error_body_becomes_one_line_with_its_field(service: Service) -> None:
    service.will("POST /v1/videos", error(400, "a clip lasts 4 to 15 seconds", "seconds"))
    with VideoClient(service.url) as client, pytest.raises(ClientError) as failure:
        client.create(VideoRequest("hi", {"seconds": "2"}))
    assert str(failure.value) == "400 invalid_request (seconds): a clip lasts 4 to 15 seconds"


def test_an_answer_of_something_else_is_an_error(service: Service) -> None:
    service.will(f"GET /v1/videos/{ID}", Answer(b"<html>hello</html>"), Answer(b"<html>bad gateway</html>", 502))
    with VideoClient(service.url) as client:
        with pytest.raises(ClientError, match="does not answer as a video service"):
            client.get(ID)
        with pytest.raises(ClientError, match="502: <html>bad gateway"):
            client.get(ID)


def test_no_service_says_how_to_start_one() -> None:
    [port] = free_ports(1)
    with VideoClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ClientError, match="make serve"):
            client.get(ID)
        assert "no answer" in (client.ready() or "")


def test_ready_gives_the_services_reason(service: Service) -> None:
    service.will("GET /readyz", Answer(b"loading", 503), Answer(b"{}"))
    with VideoClient(service.url) as client:
        assert (client.ready(), client.ready()) == ("loading", None)


def test_page_cancel_and_delete(service: Service) -> None:
    listed = VideoList(data=(video("queued"),), first_id=ID, last_id=ID, has_more=False)
    service.will("GET /v1/videos?limit=2&after=x", Answer(listed.model_dump_json().encode()))
    service.will(f"POST /v1/videos/{ID}/cancel", video("cancelled"))
    service.will(f"DELETE /v1/videos/{ID}", Answer(b"{}"))
    with VideoClient(service.url) as client:
        assert client.page(limit=2, after="x").data[0].id == ID
        assert client.cancel(ID).status == "cancelled"
        client.delete(ID)
