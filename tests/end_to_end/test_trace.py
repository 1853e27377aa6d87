"""One trace a job across both services: as a picture for Chrome, at a collector, and its id in every log line."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.end_to_end.clips import PICTURE, Clip
from tests.end_to_end.pair import Pair, make_pair
from tests.end_to_end.processes import wait_until

CLIP = Clip("traced", "ref2va", "<Picture 1> turns", (PICTURE,))
PARENTS = {
    "queued": "job ref2va",
    "encode": "job ref2va",
    "transfer": "job ref2va",
    "wait for its turn": "job ref2va",
    "Generate": "job ref2va",
    "publish": "job ref2va",
    "admission": "encode",
    "Encode": "encode",
    **dict.fromkeys(("media", "text", "vae", "pack"), "Encode"),
    "push": "transfer",
    "verify": "transfer",
    "Push": "push",
    **dict.fromkeys(("prepare", "denoise", "audio_decode", "video_decode", "mux"), "Generate"),
}
"""What every span of a job is a part of."""
PROCESSES = {"diffusion-api", "diffusion-u0", "encoder-api", "encoder-tp0"}
CLOCK_S = 0.05
"""Spans of two processes are measured by their own calls of the clock."""


@dataclass
class Collector:
    """What was sent to `url`: by trace, the spans' ids and the services that they came from."""

    url: str = ""
    spans: dict[str, dict[str, str]] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = (
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.trace_id.hex(), {})[span.span_id.hex()] = service


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    taken = Collector()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    taken.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield taken
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.fixture(scope="module")
def traced(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, cases: Path, collector: Collector
) -> Iterator[tuple[Pair, str]]:
    """A pair that logs JSON and tells a collector, and a job that it has made."""
    pair = make_pair(
        tmp_path_factory.mktemp("traced"),
        str(checkpoint),
        {"otlp_endpoint": collector.url},
        environment={"H3_LOG_FORMAT": "json", "H3_LOG_LEVEL": "debug"},
    )
    with pair.running():
        job = pair.submit(CLIP.fields(), CLIP.parts(cases))
        early = pair.client.get(f"/v1/videos/{job}/trace")
        assert early.status_code == 404
        pair.completed(job)
        yield pair, job


def drawn(pair: Pair, job: str) -> list[dict[str, Any]]:
    answer = pair.client.get(f"/v1/videos/{job}/trace")
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = answer.json()["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [{**event, "process": names[event["pid"]]} for event in events if event["ph"] == "X"]


@pytest.mark.slow
def test_every_part_lies_within_the_whole_that_it_is_a_part_of(traced: tuple[Pair, str]) -> None:
    spans = drawn(*traced)
    by_id = {span["args"]["span"]: span for span in spans}
    assert {span["process"] for span in spans} == PROCESSES
    found = {span["name"]: by_id[span["args"]["parent"]] for span in spans if span["args"]["parent"]}
    assert PARENTS.items() <= {name: parent["name"] for name, parent in found.items()}.items()
    for span in spans:
        if span["name"] in PARENTS:
            parent = by_id[span["args"]["parent"]]
            assert parent["ts"] - CLOCK_S * 1e6 <= span["ts"], span
            assert span["ts"] + span["dur"] <= parent["ts"] + parent["dur"] + CLOCK_S * 1e6, span


@pytest.mark.slow
def test_what_the_job_took_is_explained_by_its_parts(traced: tuple[Pair, str]) -> None:
    spans = drawn(*traced)
    (whole,) = (span for span in spans if span["args"]["parent"] is None)
    parts = [
        span["dur"] for span in spans if span["args"]["parent"] == whole["args"]["span"] and span["name"] != "queued"
    ]
    queued = next(span for span in spans if span["name"] == "queued")
    assert sum(parts) + queued["dur"] > 0.8 * whole["dur"]


@pytest.mark.slow
def test_a_collector_gets_one_trace_from_both_services(traced: tuple[Pair, str], collector: Collector) -> None:
    pair, job = traced
    trace = job.removeprefix("video_")
    shown = {span["args"]["span"] for span in drawn(pair, job)}
    wait_until(lambda: collector.spans.get(trace, {}).keys() == shown, 30, "all spans at the collector")
    assert set(collector.spans[trace].values()) == {"h3-encoder", "h3-diffusion"}


@pytest.mark.slow
def test_every_line_is_an_object_and_names_the_request(traced: tuple[Pair, str]) -> None:
    pair, job = traced
    seen = set()
    for service in (pair.encoder, pair.diffusion):
        lines = [line for line in service.log.read_text().splitlines() if line and not line.startswith("$ ")]
        for line in lines:
            record = json.loads(line)
            if record["request_id"] == job.removeprefix("video_"):
                seen.add(record["process"])
    assert seen == PROCESSES
