"""A pair with keys, limits and media by URL: what a deployment that strangers reach is set to."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from diffusion_service.keys import add_key
from tests.end_to_end import processes
from tests.end_to_end.bad_requests import GOOD
from tests.end_to_end.clips import file_part, form
from tests.end_to_end.pair import Pair, listed, make_pair

pytestmark = pytest.mark.slow

RETENTION_S = 40
SYNC_S = 3
SETTINGS: dict[str, object] = {
    "media_hosts": "[{host: 127.0.0.1, private: true}, localhost]",
    "media_fetch_s": 20,
    "jobs_per_key": 3,
    "sync_timeout_s": SYNC_S,
    "retention_hours": RETENTION_S / 3600,
    "dead_s": 60,  # tests stop ranks, and a machine may be slow to let them go on
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The keys by name, and the file's path as `file`."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = {name: add_key(file, name, ("create", "read_own")) for name in ("ann", "bob")}
    return {**keys, "root": add_key(file, "root", ("admin",)), "file": str(file)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, keys: dict[str, str]) -> Iterator[Pair]:
    """The pair of this file; its client is the key `root`."""
    settings = {**SETTINGS, "keys_file": keys["file"]}
    pair = make_pair(tmp_path_factory.mktemp("guarded"), str(checkpoint), settings)
    pair.client.headers["authorization"] = f"Bearer {keys['root']}"
    with pair.running():
        yield pair


@pytest.fixture(scope="module", autouse=True)
def early(pair: Pair) -> dict[str, object]:
    """A job made before all others: its time runs out while they are made."""
    video = pair.completed(pair.submit(GOOD))
    assert list(pair.state.rglob(f"{video['id']}*"))
    return video


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The files of a folder by HTTP on loopback."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_stranger_sees_health_alone(pair: Pair) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics", "/openapi.json"):
        assert httpx.get(f"{pair.diffusion.url}{path}").status_code == 200
    for path in ("/v1/videos", "/v1/models", "/v1/limits"):
        assert httpx.get(f"{pair.diffusion.url}{path}").status_code == 401


def test_fifty_posts_with_one_key_are_one_job(pair: Pair, keys: dict[str, str]) -> None:
    before = listed(pair.client).keys()
    headers = {**bearer(keys["ann"]), "Idempotency-Key": "fifty"}

    def post(_: int) -> httpx.Response:
        return httpx.post(f"{pair.diffusion.url}/v1/videos", files=form(GOOD), headers=headers, timeout=120)

    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(post, range(50)))
    assert {answer.status_code for answer in answers} == {200}
    (job,) = {answer.json()["id"] for answer in answers}
    assert listed(pair.client).keys() - before == {job}
    other = httpx.post(f"{pair.diffusion.url}/v1/videos", files=form({**GOOD, "seed": "5"}), headers=headers)
    assert other.status_code == 409
    pair.completed(job)


def test_media_by_url_make_the_clip_that_the_file_makes(pair: Pair, cases: Path) -> None:  # case 25
    fields = {**GOOD, "extra_params": '{"task": "ref2va"}'}
    by_file = pair.completed(pair.submit(fields, [file_part(cases / "ref1.png")]))
    with serving(cases) as base:
        named = {**fields, "image_reference": json.dumps({"image_url": f"{base}/ref1.png"})}
        by_url = pair.completed(pair.submit(named))
        for url in (f"{base}/none.png", base.replace("127.0.0.1", "localhost"), "http://169.254.169.254/"):
            answer = pair.post({**fields, "image_reference": json.dumps({"image_url": url})})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image_reference")
    assert by_url["frames_sha256"] == by_file["frames_sha256"]


def test_a_busy_key_waits_and_another_does_not(pair: Pair, keys: dict[str, str]) -> None:
    with processes.frozen(pair.diffusion.rank_pids()):
        jobs = []
        for name, status in (("bob", 200), ("bob", 200), ("bob", 200), ("bob", 429), ("ann", 200)):
            url = f"{pair.diffusion.url}/v1/videos"
            answer = httpx.post(url, files=form(GOOD), headers=bearer(keys[name]), timeout=60)
            assert answer.status_code == status, answer.text
            jobs += [answer.json()["id"]] if status == 200 else []
        assert pair.client.get(f"/v1/videos/{jobs[0]}").status_code == 200
        hidden = httpx.get(f"{pair.diffusion.url}/v1/videos/{jobs[0]}", headers=bearer(keys["ann"]))
        assert hidden.status_code == 404
    for job in jobs:
        pair.completed(job)


def test_sync_past_its_limit_names_the_job_which_goes_on(pair: Pair) -> None:  # case 21
    with processes.frozen(pair.diffusion.rank_pids()):
        begun = time.monotonic()
        answer = pair.client.post("/v1/videos/sync", files=form(GOOD))
        assert time.monotonic() - begun < SYNC_S + 10
    assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
    job = answer.headers["x-video-id"]
    pair.completed(job)
    assert pair.client.get(f"/v1/videos/{job}/content").status_code == 200


def test_the_log_has_an_audit_and_no_prompt(pair: Pair, cases: Path, keys: dict[str, str]) -> None:
    picture = tuple(file_part(cases / "ref1.png"))
    named = (picture[0], ("MEDIA-SECRET.png", *picture[1][1:]))
    fields = {**GOOD, "prompt": "PROMPT-SECRET"}
    job = pair.submit(fields, [named])  # type: ignore[list-item]
    pair.completed(job)
    pair.post({**fields, "seconds": "PROMPT-SECRET"}, [named])  # type: ignore[list-item]
    line = f"key=root job={job} end=completed gpu_seconds="
    processes.wait_until(lambda: line in pair.diffusion.log.read_text(), 30, "the audit line of the job's end")
    for service in (pair.diffusion, pair.encoder):
        assert "SECRET" not in service.log.read_text()
    assert not any(key in pair.diffusion.log.read_text() for name, key in keys.items() if name != "file")


def test_record_and_file_expire_together_without_anybody_asking(
    pair: Pair, early: dict[str, object]
) -> None:  # cases 3 and 9
    job, expires = early["id"], early["expires_at"]
    assert isinstance(expires, int)
    time.sleep(max(expires - time.time(), 0) + 5)
    assert not list(pair.state.rglob(f"{job}*"))
    assert job not in listed(pair.client)
    for path in ("", "/content"):
        assert pair.client.get(f"/v1/videos/{job}{path}").status_code == 404
