"""An encoder and one or several diffusion services that a crash run strikes: who lives, who is struck, what is held."""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end import processes
from tests.end_to_end.pair import FINAL, Pair, Service, free_port
from tests.faults.storm import Strike


@dataclass
class Fleet:
    """The services of one run. The pair's own diffusion service is the first of `diffusions`."""

    pair: Pair
    diffusions: list[Service]
    gone: list[Service] = field(default_factory=list)
    """Killed for good."""

    @property
    def services(self) -> list[Service]:
        """Whoever is meant to run."""
        return [service for service in (self.pair.encoder, *self.diffusions) if service not in self.gone]

    @property
    def serving(self) -> list[Service]:
        """Diffusion services that are meant to run."""
        return [service for service in self.diffusions if service not in self.gone]

    def start(self) -> None:
        """All at once; returns when all can serve."""
        for service in self.services:
            service.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until everyone who is meant to run is ready."""
        for service in self.services:
            service.wait_ready()

    def all_ready(self) -> bool:
        """Whether everyone who is meant to run is ready; False also while one has ended."""
        with contextlib.suppress(AssertionError):
            return all(service.ready() for service in self.services)
        return False

    def struck(self, strike: Strike) -> tuple[str, int, Service | None] | None:
        """Kill the process that a strike is for: what it was, its pid, and the service to start again, if one.

        None when no such process lives at present.
        """
        role, kind = strike.victim.split("-")
        if kind == "rank":
            ranks = self.ranks(role)
            if not ranks:
                return None
            name, pid = ranks[int(strike.chance * len(ranks))]
            processes.end([pid])
            return name, pid, None
        living = [service for service in self._of(role) if service.process and service.process.poll() is None]
        if not living:
            return None
        service = living[int(strike.chance * len(living))]
        pid = service.pid
        service.kill()
        return f"{role}-api at {service.port}", pid, service

    def lose(self, service: Service) -> None:
        """Kill a diffusion service for good."""
        self.gone.append(service)
        if service.process is not None and service.process.poll() is None:
            service.kill()

    def stop_others(self) -> list[str]:
        """Stop the diffusion services that are not the pair's; what was wrong about it."""
        for lost in self.gone:
            # It stays until somebody starts on that folder, and nobody may have.
            for slab in self.pair.slabs.rglob(f"*diffusion-{lost.port}*"):
                slab.unlink()
        living = [each for each in self.diffusions[1:] if each.process is not None and each.process.poll() is None]
        return [f"{each.package} at {each.port} ended with {code}" for each in living if (code := each.stop()) != 0]

    def ended_alone(self) -> list[str]:
        """Services that ended and were not killed, except by the death of their first ranks.

        They are started again, as whoever supervises them would, so that the run goes on.
        """
        wrong = []
        for service in self.services:
            code = None if service.process is None else service.process.poll()
            if code is not None and code != -signal.SIGKILL:
                if code != 2 or service.was_ready() or "closed its pipe" not in service.tail(1):
                    wrong.append(f"{service.package} at {service.port} ended by itself with {code}\n{service.tail(30)}")
                service.start()
        return wrong

    def ranks(self, role: str) -> list[tuple[str, int]]:
        """Name and pid of every living rank, by `/proc`."""
        named = ((_name(pid), pid) for pid in processes.marked(self.pair.mark))
        return sorted((name, pid) for name, pid in named if name.startswith(f"{role}-"))

    def resident(self) -> dict[str, float]:
        """Own memory of every API process and rank, MiB."""
        found = {
            f"{service.package} at {service.port}": processes.resident_mib(service.pid) for service in self.services
        }
        for role in ("encoder", "diffusion"):
            found |= {f"{name} {n}": processes.resident_mib(pid) for n, (name, pid) in enumerate(self.ranks(role))}
        return found

    def open_files(self) -> dict[str, int]:
        """Descriptors of every API process."""
        return {
            f"{service.package} at {service.port}": len(os.listdir(f"/proc/{service.pid}/fd"))
            for service in self.services
        }

    def gauge(self, service: Service, name: str) -> float:
        """The sum over all labels of a metric that `/metrics` of a service shows."""
        text = httpx.get(f"{service.url}/metrics", timeout=10).raise_for_status().text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families if family.name == name for sample in family.samples)

    def _of(self, role: str) -> Sequence[Service]:
        return [self.pair.encoder] if role == "encoder" else self.serving


def fleet_of(pair: Pair, others: int = 0) -> Fleet:
    """The pair, and as many more diffusion services beside its own, each with a port and a state folder of its own."""
    first = pair.diffusion
    fleet = Fleet(pair, [first])
    for n in range(others):
        arguments = [*first.arguments[:-1], str(pair.root / f"state-{n}")]
        log = pair.root / f"diffusion-{n}.log"
        fleet.diffusions.append(Service(first.package, arguments, free_port(), log, first.environment))
    return fleet


def is_final(video: dict[str, object]) -> bool:
    """Whether nothing will change any more."""
    return video["status"] in FINAL


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
