"""Kills processes at random while jobs of all tasks come in, and looks at what became of every job.

    python -m tests.faults.crash --minutes 10 --seed 7           200 jobs, a strike every 15 s on average
    python -m tests.faults.crash --minutes 10 --deploy-config tiny_parallel
    python -m tests.faults.crash --minutes 10 --database postgres        two diffusion services on one queue

First the same requests without strikes, for their digests; then the storm; then everything that was struck runs again,
and every job has to come to an end. Of two diffusion services one is killed for good half-way. A failed run prints its
seed and its timeline.
"""

import argparse
import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

from shared_runtime.tiny import tiny_checkpoint
from tests.cases.make_cases import shared_cases
from tests.end_to_end.clips import FilePart, form
from tests.end_to_end.pair import Digest, digest_of, make_pair
from tests.faults.aftermath import (
    SHARED,
    check_jobs,
    check_leaks,
    check_removal,
    held_files,
    set_strays_aside,
)
from tests.faults.fleet import Fleet, fleet_of
from tests.faults.storm import REQUESTS, Order, Storm, draw
from tests.faults.witness import Witness
from tests.postgres import postgres_server

LIMITS = {
    "stuck_s": 5,
    "dead_s": 5,
    "drain_s": 4,
    "lease_s": 20,
    "encode_timeout_s": 30,
    "queue_limit": 400,
    "job_lease_s": 5,
}
"""Of the services, seconds: short, so that what hangs is found while the run lasts."""
READY_S = 240.0
"""From the last strike until all services are ready."""
IDLE_S = 120.0
"""Jobs are stuck when none of those that wait has ended for so long."""
POST_S = 30.0
"""For an answer to a POST by a service that lives."""
LOOK_S = 0.4


@dataclass(frozen=True)
class Outcome:
    """A run and what it came to."""

    witness: Witness
    ends: Counter[str]
    strikes: int

    @property
    def line(self) -> str:
        """For people."""
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return f"seed {self.witness.seed}: {len(self.witness.accepted)} accepted, {ends}; {self.strikes} strikes"


class Crash:
    """One run over a fleet that is ready."""

    def __init__(self, fleet: Fleet, storm: Storm, cases: Path, *, loud: bool) -> None:
        self._fleet = fleet
        self._storm = storm
        self._parts: list[list[FilePart]] = [clip.parts(cases) for clip in REQUESTS]
        self._witness = Witness(storm.seed, loud)
        self._chance = random.Random(storm.seed)
        self._strikes = 0

    async def run(self) -> Outcome:
        """Quiet run, storm, calm, and the checks."""
        digests = await asyncio.to_thread(self._quiet)
        memory, files = self._fleet.resident(), self._fleet.open_files()
        self._witness.begun = time.monotonic()
        async with asyncio.TaskGroup() as together:
            for task in (self._submit(), self._strike(), self._watch(), self._lose()):
                together.create_task(task)
        self._witness.note(f"the storm is over; {len(self._witness.open())} jobs are open")
        await self._calm()
        ends = await asyncio.to_thread(self._check, digests, memory, files)
        return Outcome(self._witness, ends, self._strikes)

    def _quiet(self) -> list[Digest]:
        pair = self._fleet.pair
        jobs = [pair.submit(clip.fields(), parts) for clip, parts in zip(REQUESTS, self._parts, strict=True)]
        digests = [digest_of(pair.completed(job, 300)) for job in jobs]
        for job in jobs:
            pair.client.delete(f"/v1/videos/{job}").raise_for_status()
        return digests

    # During the storm

    async def _submit(self) -> None:
        async with httpx.AsyncClient(timeout=POST_S) as client, asyncio.TaskGroup() as posting:
            for order in self._storm.orders:
                await asyncio.sleep(max(0.0, order.at_s - self._witness.now_s))
                posting.create_task(self._post(client, order))

    async def _post(self, client: httpx.AsyncClient, order: Order) -> None:
        """Ask until a service accepts, as a client with an idempotency key does."""
        while True:
            service = self._chance.choice(self._fleet.serving)
            files = form(REQUESTS[order.request].fields(), self._parts[order.request])
            with contextlib.suppress(httpx.TransportError):
                answer = await client.post(
                    f"{service.url}/v1/videos", files=files, headers={"Idempotency-Key": order.key}
                )
                if answer.status_code == 200:
                    self._witness.accept(answer.json()["id"], order)
                    return
                if answer.status_code not in (429, 503):
                    self._witness.complain(f"POST answered {answer.status_code}: {answer.text}")
            await asyncio.sleep(0.5)

    async def _strike(self) -> None:
        for strike in self._storm.strikes:
            await asyncio.sleep(max(0.0, strike.at_s - self._witness.now_s))
            for wrong in self._fleet.ended_alone():
                self._witness.complain(wrong)
            struck = self._fleet.struck(strike)
            if struck is None:
                self._witness.note(f"no {strike.victim} lives at present")
                continue
            self._strikes += 1
            name, pid, service = struck
            self._witness.note(f"killed {name} ({pid})")
            if service is not None:
                await asyncio.sleep(strike.away_s)
                if service not in self._fleet.gone:
                    service.start()
        await asyncio.sleep(max(0.0, self._storm.seconds - self._witness.now_s))

    async def _lose(self) -> None:
        """Kill the last of several diffusion services for good, half-way."""
        if len(self._fleet.diffusions) > 1:
            await asyncio.sleep(self._storm.loss_s)
            lost = self._fleet.diffusions[-1]
            self._fleet.lose(lost)
            self._witness.note(f"killed diffusion at {lost.port} for good")

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=POST_S) as client:
            while self._witness.now_s < self._storm.seconds:
                await asyncio.sleep(LOOK_S)
                waiting = self._witness.open()
                for job in self._chance.sample(waiting, min(5, len(waiting))):
                    await self._look(client, job)

    async def _look(self, client: httpx.AsyncClient, job: str) -> None:
        service = self._chance.choice(self._fleet.serving)
        with contextlib.suppress(httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
            answer = await client.get(f"{service.url}/v1/videos/{job}")
            if answer.status_code != 200:
                self._witness.complain(f"GET of accepted {job} answered {answer.status_code}: {answer.text}")
                return
            self._witness.look(answer.json())

    # After it

    async def _calm(self) -> None:
        """All run again and every job ends."""
        limit = time.monotonic() + READY_S
        while not (ready := await asyncio.to_thread(self._all_ready)) and time.monotonic() < limit:
            await asyncio.sleep(LOOK_S)
        if not ready:
            self._witness.complain(f"not ready {READY_S:g} s after the storm\n{self._fleet.pair.tails()}")
        self._witness.note("all services are ready" if ready else "some services are not ready")
        waiting, limit = self._witness.open(), time.monotonic() + IDLE_S
        async with httpx.AsyncClient(timeout=POST_S) as client:
            while waiting and time.monotonic() < limit:
                for job in waiting[:10]:
                    await self._look(client, job)
                await asyncio.sleep(LOOK_S)
                if len(still := self._witness.open()) < len(waiting):
                    waiting, limit = still, time.monotonic() + IDLE_S
        for job in waiting:
            self._witness.complain(f"{job} is stuck: {self._witness.seen.get(job)}")
        self._witness.note("every job has ended" if not waiting else "some jobs are stuck")

    def _all_ready(self) -> bool:
        for wrong in self._fleet.ended_alone():
            self._witness.complain(wrong)
        return self._fleet.all_ready()

    def _check(self, digests: list[Digest], memory: dict[str, float], files: dict[str, int]) -> Counter[str]:
        with httpx.Client(base_url=self._fleet.serving[0].url, timeout=60) as client:
            set_strays_aside(self._witness, self._fleet, client, self._strikes)
            deadline = time.monotonic() + 10
            while held_files(self._fleet) and time.monotonic() < deadline:
                time.sleep(0.2)
            ends = check_jobs(self._witness, client, digests)
            check_leaks(self._witness, self._fleet, memory, files)
            check_removal(self._witness, self._fleet, client)
        if ends["completed"] * 2 < len(self._witness.accepted):
            self._witness.complain(f"of {len(self._witness.accepted)} accepted jobs {ends['completed']} completed")
        if len(self._witness.accepted) != len(self._storm.orders):
            self._witness.complain(f"{len(self._witness.accepted)} of {len(self._storm.orders)} orders were accepted")
        return ends


def crash(
    root: Path, cases: Path, storm: Storm, *, base: str = "tiny", database: str | None = None, loud: bool = False
) -> Outcome:
    """Start the services in `root`, let the storm over them, stop them. What was wrong is in the outcome's witness.

    With the URL of an empty PostgreSQL `database` there are two diffusion services and one folder of files for both.
    """
    shared = {} if database is None else {"database": database, "storage": {"url": str(root / SHARED)}}
    pair = make_pair(root, str(tiny_checkpoint()), {**LIMITS, **shared}, base=base)
    fleet = fleet_of(pair, others=0 if database is None else 1)
    try:
        fleet.start()
        outcome = asyncio.run(Crash(fleet, storm, cases, loud=loud).run())
    finally:
        wrong = fleet.stop_others()
        wrong += pair.close()
        shutil.rmtree(pair.slabs)
    for each in wrong:
        outcome.witness.complain(each)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """One run; its line, and its timeline where something was wrong."""
    parser = argparse.ArgumentParser(prog="tests.faults.crash", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--every", type=float, default=15, help="seconds between strikes, on average")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--deploy-config", default="tiny")
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--keep", type=Path, help="folder for logs and state, kept after the run")
    options = parser.parse_args(arguments)
    seed = random.randrange(2**31) if options.seed is None else options.seed
    storm = draw(seed, options.minutes * 60, options.jobs, options.every)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="h3-crash-")))
        (root / "run").mkdir()
        postgres = options.database == "postgres"
        database = stack.enter_context(postgres_server()).new_database() if postgres else None
        base = options.deploy_config
        outcome = crash(root / "run", shared_cases(), storm, base=base, database=database, loud=True)
        if options.keep:
            shutil.copytree(root / "run", options.keep, dirs_exist_ok=True)
    print(outcome.line)
    if outcome.witness.wrong:
        print(outcome.witness.report())
    return 1 if outcome.witness.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
