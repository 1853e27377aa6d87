"""Whatever is wrong with a request is said at POST: no job, no file, no rank that saw it, no memory spent."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end import processes
from tests.end_to_end.bad_requests import ALL, BOMBS, FIELD, FILES, GOOD, Bad
from tests.end_to_end.clips import file_part, form
from tests.end_to_end.endless_upload import upload
from tests.end_to_end.pair import Pair

LARGEST_UPLOAD = 600 * 2**20


@pytest.fixture(scope="module", autouse=True)
def _no_rank_is_worse_for_it(pair: Pair) -> Iterator[None]:
    # case 11
    ranks = [*pair.encoder.rank_pids(), *pair.diffusion.rank_pids()]
    yield
    assert [*pair.encoder.rank_pids(), *pair.diffusion.rank_pids()] == ranks
    for service in (pair.encoder, pair.diffusion):
        assert httpx.get(f"{service.url}/health").json()["restarts"] == 0
        assert service.ready()


@pytest.fixture(autouse=True)
def _no_job_and_no_file(pair: Pair) -> Iterator[None]:
    jobs = pair.job_count()
    yield
    assert pair.job_count() == jobs
    processes.wait_until(lambda: not pair.unfinished_files(), 30, f"no file is left of {pair.unfinished_files()}")
    assert pair.temporary_files() == []


def refused(pair: Pair, bad: Bad, cases: Path) -> None:
    """Send it while every rank is stopped: an answer within moments needed none of them."""
    parts = [file_part(cases / name, FIELD) for name in bad.files]
    ranks = [*pair.encoder.rank_pids(), *pair.diffusion.rank_pids()]
    with processes.frozen(ranks):
        answer = pair.post(bad.form(), parts)
    assert answer.status_code == bad.status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert not bad.param or any(part in (error["param"] or "") for part in bad.param.split("|")), error
    assert bad.says in error["message"], error
    assert bad.code in (error["code"] or ""), error
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("bad", ALL, ids=lambda bad: bad.name)
def test_a_bad_request_is_refused_by_name(pair: Pair, cases: Path, bad: Bad) -> None:
    refused(pair, bad, cases)


def test_sync_refuses_bad_files_with_the_same_words(pair: Pair, cases: Path) -> None:
    # case 12
    for bad in FILES:
        answers = [
            pair.client.post(path, files=form(bad.form(), [file_part(cases / name, FIELD) for name in bad.files]))
            for path in ("/v1/videos", "/v1/videos/sync")
        ]
        assert [answer.status_code for answer in answers] == [400, 400], bad.name
        assert answers[0].json() == answers[1].json(), bad.name


@pytest.mark.parametrize("bad", BOMBS, ids=lambda bad: bad.name)
@pytest.mark.steady
def test_a_bomb_is_refused_before_memory_is_spent(pair: Pair, cases: Path, bad: Bad) -> None:
    # case 67
    before = processes.forget_peak(pair.diffusion.pid)
    begun = processes.cpu_s(pair.diffusion.pid)
    refused(pair, bad, cases)
    assert processes.cpu_s(pair.diffusion.pid) - begun < 2
    assert processes.peak_mib(pair.diffusion.pid) - before < 200


def test_a_prompt_past_ten_thousand_tokens_is_refused_with_the_count(pair: Pair) -> None:
    # case 71
    answer = pair.post({**GOOD, "prompt": "ab" * 10_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert "20000" in answer.json()["error"]["message"].replace(",", "")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/plain"}, b"prompt=hi", 415),
        ({"Content-Type": "multipart/form-data"}, b"prompt=hi", 400),
        ({"Content-Type": "application/json"}, b"[1, 2]", 400),
        ({"Content-Type": "application/json"}, b'{"prompt": ', 400),
        ({"Content-Type": "application/json"}, b'{"prompt": "\\ud800"}', 400),
        ({"Content-Type": "application/json"}, b'{"prompt": 7}', 400),
    ],
)
def test_a_body_that_is_not_read_is_refused(pair: Pair, headers: dict[str, str], body: bytes, status: int) -> None:
    # case 13
    answer = pair.client.post("/v1/videos", headers=headers, content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/videos/video_unknown", "/v1/videos/../../etc/passwd"])
def test_what_is_not_there_is_404_in_the_same_form(pair: Pair, path: str) -> None:
    answer = pair.client.get(path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


def test_another_method_is_405_in_the_same_form(pair: Pair) -> None:
    answer = pair.client.put("/v1/videos")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(("query", "param"), [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order")])
def test_a_bad_page_is_refused(pair: Pair, query: str, param: str) -> None:
    answer = pair.client.get(f"/v1/videos?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_page_after_nobody_is_refused(pair: Pair) -> None:
    answer = pair.client.get("/v1/videos", params={"after": f"video_{'0' * 32}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize("chunked", [False, True], ids=["content-length", "chunked"])
@pytest.mark.steady
def test_an_endless_upload_is_cut_off_while_it_streams(pair: Pair, chunked: bool) -> None:
    # case 14
    before = processes.forget_peak(pair.diffusion.pid)
    sent, answer = upload(pair.diffusion.port, 2 * 2**30, chunked=chunked)
    assert sent < LARGEST_UPLOAD
    assert answer.split(b" ")[1:2] == [b"413"], answer[:300]
    assert processes.peak_mib(pair.diffusion.pid) - before < 64


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_client_that_leaves_while_sending_leaves_nothing(pair: Pair, cases: Path, share: float) -> None:
    # case 6
    fields = {**GOOD, "extra_params": '{"task": "ref2va"}'}
    files = form(fields, [file_part(cases / "vid_15s.mp4")])
    request = pair.client.build_request("POST", "/v1/videos", files=files)
    body = request.read()
    head = f"POST /v1/videos HTTP/1.1\r\nHost: h3\r\nContent-Type: {request.headers['content-type']}\r\n"
    with socket.create_connection(("127.0.0.1", pair.diffusion.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: int(len(body) * share)])
        time.sleep(0.1)


def test_many_bad_requests_at_once_are_answered_at_once(pair: Pair, cases: Path) -> None:
    # case 10
    overrides = ({"seconds": "2", "num_frames": None}, {"size": "0x64"}, {"extra_params": '{"task": "nope"}'})
    bad = [Bad("", fields) for fields in overrides for _ in range(20)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda one: pair.post(one.form()), bad))
    assert {answer.status_code for answer in answers} == {400}
    assert max(answer.elapsed.total_seconds() for answer in answers) < 5


def test_bad_files_sent_twenty_times_harm_nobody(pair: Pair, cases: Path) -> None:
    # case 11
    stop = threading.Event()
    unhealthy: list[int] = []

    def watch() -> None:
        while not stop.wait(0.05):
            status = httpx.get(f"{pair.diffusion.url}/health").status_code
            unhealthy.extend([status] if status != 200 else [])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for name in ("fake.png", "img_trunc.jpg", "aud_bad.wav", "vid_nomoov.mp4", "img_tiny.png") * 20:
            answer = pair.post({**GOOD, "extra_params": json.dumps({"task": "ref2va"})}, [file_part(cases / name)])
            assert 400 <= answer.status_code < 500, f"{name}: {answer.text}"
    finally:
        stop.set()
        watcher.join()
    assert unhealthy == []
