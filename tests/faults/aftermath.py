"""After a crash run: every accepted job has ended for a reason, clips are those of a quiet run, and nothing is left."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import httpx

from diffusion_service.mux import check_clip
from tests.end_to_end import processes
from tests.end_to_end.pair import Digest, digest_of, listed
from tests.faults.fleet import Fleet
from tests.faults.storm import REQUESTS
from tests.faults.witness import Witness

STATED = {"worker_died", "encoder_unavailable", "transfer_failed", "timeout"}
"""Why a job may fail whose processes are killed."""
GROWN_API_MIB, GROWN_RANK_MIB = 64.0, 160.0
"""How much more than after the quiet run a process may hold."""
GROWN_FILES = 24
SHARED = "shared"
"""Folder in the pair's root where several diffusion services keep files."""


def check_jobs(witness: Witness, client: httpx.Client, digests: list[Digest]) -> Counter[str]:
    """Complain about jobs that are lost, doubled, stuck, without a stated end, or with another clip. Counts by end."""
    known = listed(client)
    for job in witness.accepted.keys() - known.keys():
        witness.complain(f"{job} was accepted and is lost")
    for job in known.keys() - witness.accepted.keys():
        witness.complain(f"{job} was made and given to nobody")
    ends: Counter[str] = Counter()
    for job in witness.accepted.keys() & known.keys():
        video = known[job]
        error = video["error"] if isinstance(video["error"], dict) else {}
        ends[str(error.get("code") or video["status"])] += 1
        match video["status"]:
            case "completed":
                _check_clip(witness, client, video, digests[witness.accepted[job].request])
            case "failed" if error.get("code") in STATED and error.get("message"):
                pass
            case _:
                witness.complain(f"{job} ended as {video['status']}, {video['error']}")
        if video["attempt"] not in (1, 2):
            witness.complain(f"{job} took {video['attempt']} attempts")
    return ends


def _check_clip(witness: Witness, client: httpx.Client, video: dict[str, object], digest: Digest) -> None:
    job = str(video["id"])
    request = REQUESTS[witness.accepted[job].request]
    if digest_of(video) != digest:
        witness.complain(f"{job} ({request.name}, seed {request.seed}) has another clip than in a quiet run")
    answer = client.get(f"/v1/videos/{job}/content")
    outputs = video["outputs"]
    assert isinstance(outputs, list)
    if answer.status_code != 200 or len(answer.content) != outputs[0]["bytes"]:
        witness.complain(
            f"content of {job}: {answer.status_code}, {len(answer.content)} bytes of {outputs[0]['bytes']}"
        )
        return
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        file.write(answer.content)
        file.flush()
        if check_clip(Path(file.name)).frames != video["num_frames"]:
            witness.complain(f"the file of {job} is not whole")


def check_leaks(witness: Witness, fleet: Fleet, before: dict[str, float], files_before: dict[str, int]) -> None:
    """Complain about memory, descriptors, processes, slabs and files that a quiet fleet does not hold."""
    for name, now in fleet.resident().items():
        allowed = GROWN_RANK_MIB if "-" in name else GROWN_API_MIB
        if name in before and now > before[name] + allowed:
            witness.complain(f"{name} holds {now:.0f} MiB, {before[name]:.0f} MiB after the quiet run")
    for name, count in fleet.open_files().items():
        if name in files_before and count > files_before[name] + GROWN_FILES:
            witness.complain(f"{name} has {count} open files, {files_before[name]} after the quiet run")
    wanted = len(fleet.services) * 2 + len(fleet.ranks("encoder")) + len(fleet.ranks("diffusion"))
    living = processes.marked(fleet.pair.mark)
    if len(living) != wanted:
        lines = "\n".join(processes.command_line(pid) for pid in living)
        witness.complain(f"{len(living)} processes, not an API process, a forker and ranks for each service:\n{lines}")
    for what in [*held_files(fleet), *held_memory(fleet)]:
        witness.complain(what)


def held_memory(fleet: Fleet) -> list[str]:
    """Landings of slabs that are neither free nor kept by the conditioning cache, and encodings that nobody fetched."""
    found = []
    for service in fleet.serving:
        landings = fleet.gauge(service, "h3_slab_landings") - fleet.gauge(service, "h3_conditioning_cache_entries")
        quarantined = fleet.gauge(service, "h3_slab_quarantined_landings")
        if (landings, quarantined) != (0, 0):
            found.append(f"slab of {service.port}: {landings:g} landings, {quarantined:g} in quarantine")
    waiting = fleet.gauge(fleet.pair.encoder, "h3_encodings_waiting")
    return [*found, f"{waiting:g} encodings wait at the encoder"] if waiting else found


def held_files(fleet: Fleet) -> list[str]:
    """Slabs beyond one a diffusion service, files in the temporary folder, and files of jobs that are over."""
    slabs = [path for path in fleet.pair.slabs.rglob("*") if path.is_file()]
    expected = range(len(fleet.serving), len(fleet.diffusions) + 1)
    found = [] if len(slabs) in expected else [f"{len(slabs)} slabs: {slabs}"]
    found += [f"temporary file {path}" for path in fleet.pair.temporary_files()]
    found += [f"file {path}" for path in (fleet.pair.root / SHARED).glob("inputs/**/*") if path.is_file()]
    return found + fleet.pair.unfinished_files()


def set_strays_aside(witness: Witness, fleet: Fleet, client: httpx.Client, strikes: int) -> None:
    """Inputs on the shared shelf of requests that got no job: their service was killed in between, at most once each.

    They go by themselves within the hour, which is no time for a test.
    """
    known = listed(client)
    strays = [path for path in (fleet.pair.root / SHARED).glob("inputs/*") if path.name not in known]
    if len(strays) > strikes:
        witness.complain(f"{len(strays)} requests left inputs and got no job, after {strikes} strikes")
    for path in strays:
        witness.note(f"inputs of {path.name} stay for an hour: its service was killed before it was a job")
        shutil.rmtree(path)


def check_removal(witness: Witness, fleet: Fleet, client: httpx.Client) -> None:
    """Delete everything: no record and no file may be left."""
    for job in listed(client):
        answer = client.delete(f"/v1/videos/{job}")
        if answer.status_code != 200:
            witness.complain(f"DELETE of {job}: {answer.status_code}, {answer.text}")
    left = [*listed(client), *fleet.pair.state.rglob("video_*")]
    left += [str(path) for path in (fleet.pair.root / SHARED).rglob("video_*")]
    if left:
        witness.complain(f"left after everything was deleted: {left}")
