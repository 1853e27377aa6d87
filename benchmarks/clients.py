"""A job while ten clients poll it, and the same job while a thousand poll it and two hundred listen, in turn.

Limits of the project: p99 of a GET at most `P99_RATIO` times, CPU seconds of the API process per answered GET at most
`CPU_RATIO` times, CPU seconds of the job's ranks at most `RANK_RATIO` times what they are with ten clients.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from benchmarks.figures import percentile
from shared_schema.videos import FINAL
from tests.end_to_end.clips import Clip, form

P99_RATIO, CPU_RATIO, RANK_RATIO = 5.0, 1.5, 1.1
EVERY_S = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    """One job with one crowd."""

    clients: int
    streams: int
    latencies_ms: list[float]
    answered: int
    events: int
    unexpected: dict[str, int]
    job_s: float
    api_cpu_s: float
    rank_cpu_s: float


@dataclass(frozen=True)
class Watched:
    """The processes whose CPU time counts."""

    api: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, client: httpx.Client, api: int) -> "Watched":
        """The ranks are those of `/health`."""
        ranks = client.get("/health").json()["ranks"]
        return cls(api, tuple(rank["pid"] for rank in ranks))

    def api_cpu_s(self) -> float:
        """Of the API process."""
        return _cpu_s(self.api)

    def rank_cpu_s(self) -> float:
        """Of the ranks together."""
        return sum(map(_cpu_s, self.ranks))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def crowd(url: str, job: str, clients: int, streams: int, found: dict[str, object]) -> Iterator[None]:
    """Poll and listen meanwhile; afterwards `found` holds what the crowd saw."""
    command = [sys.executable, "-m", "benchmarks.crowd", url, job, "--clients", str(clients), "--every", str(EVERY_S)]
    command += ["--streams", str(streams)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("the crowd did not start")
        try:
            yield
        finally:
            process.stdin.close()
            found.update(json.loads(process.stdout.readline()))


def turn(client: httpx.Client, watched: Watched, clip: Clip, clients: int, streams: int) -> Turn:
    """Make one clip with a crowd around it.

    The ranks' time is that of the whole job, however long its crowd takes to come; the API's begins when it is there.
    """
    url = str(client.base_url).rstrip("/")
    ranks = watched.rank_cpu_s()
    job = client.post("/v1/videos", files=form(clip.fields())).raise_for_status().json()["id"]
    found: dict[str, object] = {}
    with crowd(url, job, clients, streams, found):
        api = watched.api_cpu_s()
        begun = time.monotonic()
        while (video := client.get(f"/v1/videos/{job}").json())["status"] not in FINAL:
            time.sleep(0.5)
        took = time.monotonic() - begun
        api_cpu_s, rank_cpu_s = watched.api_cpu_s() - api, watched.rank_cpu_s() - ranks
    if video["status"] != "completed":
        raise RuntimeError(f"the job ended as {video['status']}: {video['error']}")
    statuses, latencies = found["statuses"], found["latencies_ms"]
    assert isinstance(statuses, dict)
    assert isinstance(latencies, list)
    unexpected = {name: count for name, count in statuses.items() if name not in ("200", "stream 200")}
    answered, events = statuses.get("200", 0), found["events"]
    assert isinstance(events, int)
    return Turn(clients, streams, latencies, answered, events, unexpected, took, api_cpu_s, rank_cpu_s)


def side(turns: list[Turn]) -> dict[str, object]:
    """All turns with one crowd together."""
    latencies = [value for each in turns for value in each.latencies_ms]
    answered = sum(each.answered for each in turns)
    return {
        "clients": turns[0].clients,
        "streams": turns[0].streams,
        "answered_gets": answered,
        "events": sum(each.events for each in turns),
        "unexpected": dict(sum((Counter(each.unexpected) for each in turns), Counter())),
        "get_p50_ms": round(percentile(latencies, 0.5), 3),
        "get_p99_ms": round(percentile(latencies, 0.99), 3),
        "api_cpu_s": round(sum(each.api_cpu_s for each in turns), 3),
        "api_cpu_ms_per_get": round(sum(each.api_cpu_s for each in turns) / answered * 1e3, 4),
        "rank_cpu_s_per_job": round(median(each.rank_cpu_s for each in turns), 3),
        "job_s": round(median(each.job_s for each in turns), 2),
    }


def measure(client: httpx.Client, api: int, clip: Clip, repeat: int, many: int, streams: int) -> dict[str, object]:
    """Both crowds in turn, `repeat` times."""
    watched = Watched.of(client, api)
    few_turns, many_turns = [], []
    for n in range(repeat):
        few_turns.append(turn(client, watched, clip, 10, 0))
        many_turns.append(turn(client, watched, clip, many, streams))
        print(f"  clients {n + 1}/{repeat}: {few_turns[-1].job_s:.1f} s and {many_turns[-1].job_s:.1f} s", flush=True)
    few, crowded = side(few_turns), side(many_turns)
    ratios = {
        "get_p99_ratio": _ratio(crowded, few, "get_p99_ms"),
        "api_cpu_per_get_ratio": _ratio(crowded, few, "api_cpu_ms_per_get"),
        "rank_cpu_ratio": _ratio(crowded, few, "rank_cpu_s_per_job"),
    }
    limits = {"get_p99_ratio": P99_RATIO, "api_cpu_per_get_ratio": CPU_RATIO, "rank_cpu_ratio": RANK_RATIO}
    within = all(ratios[name] <= limit for name, limit in limits.items())
    more = _number(crowded, "answered_gets") - _number(few, "answered_gets")
    added = (_number(crowded, "api_cpu_s") - _number(few, "api_cpu_s")) / more * 1e3
    return {
        "few": few,
        "many": crowded,
        **ratios,
        "api_cpu_ms_per_added_get": round(added, 4),
        "limits": limits,
        "within_limits": within,
    }


def _ratio(many: dict[str, object], few: dict[str, object], name: str) -> float:
    return round(_number(many, name) / _number(few, name), 3)


def _number(figures: dict[str, object], name: str) -> float:
    value = figures[name]
    assert isinstance(value, int | float)
    return float(value)
