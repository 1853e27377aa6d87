"""One job through the public API as a client lives it: POST, poll, download, and what the job says of its stages."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from diffusion_service.mux import check_clip
from tests.end_to_end.clips import Clip, FilePart, form

POLL_S = 0.02


@dataclass(frozen=True)
class ServedRun:
    """Seconds from sending the POST until the last byte of the MP4 is here, and the server's own account."""

    total_s: float
    accepted_s: float
    """Until the POST was answered."""
    stages_s: dict[str, float]
    forwards: int
    file_bytes: int
    peak_memory_mb: float | None

    @property
    def residual_s(self) -> float:
        """What no stage accounts for; negative where stages overlap. `encode` holds its `encode_` parts already."""
        whole = (seconds for name, seconds in self.stages_s.items() if not name.startswith("encode_"))
        return self.total_s - sum(whole)


def take(clip: Clip, number: object) -> Clip:
    """The same clip with other words: a conditioning that is kept would leave out the encoding."""
    return replace(clip, prompt=f"{clip.prompt}, take {number}")


def run_job(
    client: httpx.Client, fields: dict[str, str], parts: list[FilePart], out: Path, poll_s: float = POLL_S
) -> ServedRun:
    """Make one clip, asking after it every `poll_s`, and check that its file decodes.

    Raises:
        RuntimeError: refused, failed, not encoded for it, or not the clip that was asked for.
    """
    begun = time.perf_counter()
    answer = client.post("/v1/videos", files=form(fields, parts))
    accepted = time.perf_counter() - begun
    if answer.status_code != 200:
        raise RuntimeError(f"POST answered {answer.status_code}: {answer.text}")
    video = answer.json()
    while video["status"] in ("queued", "in_progress"):
        time.sleep(poll_s)
        video = client.get(f"/v1/videos/{video['id']}").json()
    if video["status"] != "completed":
        raise RuntimeError(f"job {video['id']} is {video['status']}: {video['error']}")
    if video["conditioning_cache"] == "hit":
        raise RuntimeError(f"job {video['id']} was not encoded: its words and media are those of an earlier one")
    data = client.get(f"/v1/videos/{video['id']}/content").content
    total = time.perf_counter() - begun
    out.write_bytes(data)
    facts = check_clip(out)
    if facts.frames != video["num_frames"]:
        raise RuntimeError(f"the file of {video['id']} holds {facts.frames} frames, not {video['num_frames']}")
    return ServedRun(total, accepted, video["stage_durations"], video["forwards"], len(data), video["peak_memory_mb"])
