"""A real Prometheus scrapes the pair: documented names are the exported ones, every query of the dashboard has data."""

import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from shared_runtime.gpu_memory import GpuMemory, Memory
from shared_runtime.metrics import exposition
from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Pair, free_port, listens
from tests.end_to_end.processes import frozen, marked, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docker" / "monitoring"
SPELLED = {"counter": "_total", "info": "_info"}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs Debian's package prometheus"
)


def documented(service: str) -> set[str]:
    lines = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `h3_")]
    return {name for _, names, _, where, *_ in rows if where.strip() in (service, "both") for name in ticked(names)}


def ticked(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def exported(url: str) -> set[str]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=5).text)
    names = {family.name + SPELLED.get(family.type, "") for family in families}
    return {name for name in names if name.startswith("h3_")}


def queries() -> list[str]:
    panels = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_documented_names_are_the_exported_ones(pair: Pair) -> None:
    assert documented("encoder") == exported(pair.encoder.url)
    assert documented("diffusion") == exported(pair.diffusion.url)


def test_a_scrape_waits_for_no_rank(pair: Pair) -> None:
    api = {service.process.pid for service in (pair.encoder, pair.diffusion) if service.process is not None}
    with frozen(marked(pair.mark) - api):
        for service in (pair.encoder, pair.diffusion):
            assert "h3_ready" in httpx.get(f"{service.url}/metrics", timeout=10).text


@needs_prometheus
def test_the_rules_are_checked_and_each_fires_in_its_own_test() -> None:
    for command in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        done = subprocess.run(["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    alerts = set(re.findall(r"alert: (\w+)", (MONITORING / "alerts.yml").read_text()))
    tested = (MONITORING / "alerts_test.yml").read_text()
    for outcome in ("fires", "stays quiet"):
        assert alerts == set(re.findall(rf"name: (\w+) {outcome}", tested))
    explained = re.findall(r"^\| `(H3\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.M)
    assert sorted(alerts) == sorted(explained)


@pytest.fixture
def made_up_gpu() -> Iterator[int]:
    """The port of a service that has a GPU, for the two names of which a pair on CPUs has nothing to say."""
    registry, read = CollectorRegistry(), threading.Event()

    def reader() -> dict[str, Memory]:
        read.set()
        return {"GPU-1": Memory(used=30, total=100)}

    memory = GpuMemory(reader)
    registry.register(memory)
    assert read.wait(5)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(exposition(registry))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server.server_address[1]
    server.shutdown()
    serving.join()
    server.server_close()
    memory.close()


@pytest.fixture
def prometheus(pair: Pair, made_up_gpu: int, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that asks both services every second."""
    targets = {"h3-diffusion": pair.diffusion.port, "h3-encoder": pair.encoder.port, "made-up-gpu": made_up_gpu}
    asked = {name: [{"targets": [f"127.0.0.1:{port}"]}] for name, port in targets.items()}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": name, "static_configs": each} for name, each in asked.items()],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=tmp_path, stderr=log)
    try:
        wait_until(lambda: listens(port), 30, "Prometheus listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(30)


def answered(url: str, query: str) -> bool:
    """Whether the query gives at least one number."""
    wide = query.replace("$__rate_interval", "2m")
    answer = httpx.get(f"{url}/api/v1/query", params={"query": wide}, timeout=10).json()
    assert answer["status"] == "success", (query, answer)
    return any(not math.isnan(float(sample["value"][1])) for sample in answer["data"]["result"])


@needs_prometheus
@pytest.mark.timeout(400)
def test_every_query_of_the_dashboard_has_data(pair: Pair, prometheus: str) -> None:
    silent = queries()
    assert len(silent) > 30
    for number in range(8):
        fields = {**TEXT.fields(), "prompt": f"measured {number // 2}"}  # every other one is a cache hit
        pair.completed(pair.submit(fields))
        assert pair.post({"prompt": ""}).status_code == 400
        # Between two scrapes, as Prometheus sees a counter rise only where it has seen it before.
        await_scrape(prometheus)
        silent = [query for query in silent if not answered(prometheus, query)]
        if not silent:
            break
    assert not silent
    assert answered(prometheus, "up == 1")
    assert not answered(prometheus, "up == 0")


def await_scrape(url: str) -> None:
    begun = scrapes(url)
    wait_until(lambda: scrapes(url) > begun, 60, "one more scrape")


def scrapes(url: str) -> int:
    """How often the diffusion service was asked in the last hour."""
    query = 'count_over_time(up{job="h3-diffusion"}[1h])'
    result = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10).json()["data"]["result"]
    return int(result[0]["value"][1]) if result else 0
