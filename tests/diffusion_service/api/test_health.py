"""Who may send traffic here, and when."""

from pathlib import Path

from tests.diffusion_service.api.served import Served, serve


def test_health_follows_its_source(tmp_path: Path) -> None:  # case 41
    async def body(served: Served) -> None:
        for path in ("/livez", "/readyz", "/readyz/api", "/health"):
            assert (await served.client.get(path)).status_code == 200
        served.health.reason = "no encoder answers"
        for path, status in (("/livez", 200), ("/readyz", 503), ("/readyz/api", 200), ("/health", 503)):
            assert (await served.client.get(path)).status_code == status
        health = (await served.client.get("/health")).json()
        assert (health["status"], health["reason"]) == ("unhealthy", "no encoder answers")

    serve(tmp_path, body)


def test_metrics_are_prometheus_text(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        answer = await served.client.get("/metrics")
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")

    serve(tmp_path, body)


def test_a_service_that_ends_is_not_ready(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        served.health.draining = True
        answer = await served.client.get("/readyz")
        assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
        served.health.reason = "no encoder"
        assert (await served.client.get("/readyz")).json()["reason"] == "draining; no encoder"

    serve(tmp_path, body)


def test_the_api_is_ready_while_store_and_disk_work(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        (served.folder / "uploads").rmdir()
        answer = await served.client.get("/readyz/api")
        assert (answer.status_code, answer.json()["status"]) == (503, "unhealthy")
        (served.folder / "uploads").mkdir()

    serve(tmp_path, body)
