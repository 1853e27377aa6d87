"""docker/compose.nixl.yaml: the payload crosses by NIXL between two containers, and the log says how fast."""

import re
import uuid

import httpx

from tests.containers.stack import ROOT, Stack
from tests.end_to_end.pair import free_port
from tests.end_to_end.plain_media import read_clip


def test_a_clip_is_made_over_nixl_and_the_log_has_the_rate() -> None:
    stack = Stack(f"h3-{uuid.uuid4().hex[:8]}", free_port(), overlays=(ROOT / "docker" / "compose.nixl.yaml",))
    try:
        stack.up()
        fields = {"prompt": "a red ball", "size": "64x64", "num_frames": "107", "num_inference_steps": "2"}
        answer = httpx.post(f"{stack.url}/v1/videos/sync", data=fields, timeout=120)
        assert answer.status_code == 200, answer.text
        assert len(read_clip(answer.content).frames) == 107
        pushed = httpx.get(f"{stack.url}/metrics", timeout=10).text
        assert re.search(r'^h3_transport_bytes_total\{transport="nixl"\} [1-9]', pushed, re.MULTILINE)
        rate = re.search(r"probe of \d+ MiB: [\d.]+ GiB/s", stack.logs("diffusion"))
        assert rate is not None
        print(rate[0])
    finally:
        stack.down()
    assert stack.left() == []
