"""Which receivers a request may name, and what the job shows of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared_schema.deploy.service import AllowedHost
from tests.diffusion_service.api.served import LIMITS, Served, error, serve

WITH_HOOKS = replace(LIMITS, webhook_hosts=(AllowedHost(host="hooks.test"), AllowedHost(host="*.inner.test")))
GOOD = {"prompt": "x", "size": "64x64", "num_frames": 107}


@pytest.mark.parametrize("url", ["https://hooks.test/done?job=1", "http://a.inner.test:8080/", "https://HOOKS.test"])
def test_a_listed_host_is_kept_and_shown(tmp_path: Path, url: str) -> None:
    async def body(served: Served) -> None:
        answer = await served.post({**GOOD, "webhook_url": url})
        job = await served.job(answer)
        assert job.webhook is not None
        assert answer.json()["webhook"] == {
            "url": url,
            "state": "pending",
            "attempts": 0,
            "next_attempt_at": None,
            "last_status": None,
            "last_error": None,
            "delivered_at": None,
        }
        ended = await served.runner.cancel(job.id)
        assert ended.webhook is not None
        assert ended.webhook.due_at == ended.completed_at

    serve(tmp_path, body, WITH_HOOKS)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hooks.test",
        "ftp://hooks.test/",
        "https://other.test/",
        "https://hooks.test.evil.test/",
        "https://user:pass@hooks.test/",
        "https://inner.test/",
        "https://hooks.test/" + "x" * 2048,
        "file:///etc/passwd",
    ],
)
def test_anything_else_is_refused_and_leaves_no_job(tmp_path: Path, url: str) -> None:
    async def body(served: Served) -> None:
        assert error(await served.post({**GOOD, "webhook_url": url}))["param"] == "webhook_url"
        assert await served.store.ids() == frozenset()

    serve(tmp_path, body, WITH_HOOKS)


def test_a_server_without_listed_hosts_says_that_webhooks_are_off(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        refused = error(await served.post({**GOOD, "webhook_url": "https://hooks.test/"}))
        assert (refused["param"], refused["code"]) == ("webhook_url", "not_served")

    serve(tmp_path, body)
