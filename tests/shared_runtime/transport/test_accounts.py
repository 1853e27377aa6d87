"""What a transport counts, and what a slab shows."""

import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from shared_runtime.metrics import exposition
from shared_runtime.transport.accounts import SlabCollector, TransportAccounts
from shared_runtime.transport.shm import ShmSender
from shared_runtime.transport.slab import Slab
from tests.shared_runtime.test_metrics import samples
from tests.shared_runtime.transport.processes import child

MIB = 2**20


def test_pushes_are_counted_by_transport() -> None:
    registry = CollectorRegistry()
    accounts = TransportAccounts(registry)
    accounts.pushed("shm", 3_000_000, 0.001)
    accounts.pushed("shm", 1_000_000, 0.0)  # too quick for the clock: no rate
    accounts.pushed("nixl", 5, 0.5)
    accounts.waited("shm", 0.3)
    accounts.failed("shm", "lease_expired")
    seen = samples(exposition(registry))
    assert seen['h3_transport_bytes_total{transport="shm"}'] == 4_000_000
    assert seen['h3_transport_seconds_count{transport="shm"}'] == 2
    assert seen['h3_transport_bytes_per_second_count{transport="shm"}'] == 1
    assert seen['h3_transport_bytes_per_second_sum{transport="shm"}'] == 3e9
    assert seen['h3_transport_bytes_total{transport="nixl"}'] == 5
    assert seen['h3_transport_wait_seconds_bucket{le="0.5",transport="shm"}'] == 1
    assert seen['h3_transport_failures_total{code="lease_expired",transport="shm"}'] == 1


def test_a_slab_shows_what_it_holds_and_has_seen(folder: Path) -> None:
    with child("own", folder, MIB) as owner:
        owner.hear()
    registry, slab = CollectorRegistry(), Slab.create(folder, MIB, "test")  # after the owner was killed
    registry.register(SlabCollector("shm", lambda: slab.stats))
    sender = ShmSender(folder)
    kept, lapsing = (slab.reserve(1000, "1" * 32, 5.0, time.time()) for _ in range(2))
    slab.verify(kept, sender.push_bytes(kept, memoryview(bytes(1000))).checksum)
    slab.expire(lapsing.deadline)
    seen = samples(exposition(registry))
    sender.close()
    slab.close()
    assert seen['h3_slab_bytes{transport="shm"}'] == MIB
    assert seen['h3_slab_landings{transport="shm"}'] == 1
    assert 1000 < seen['h3_slab_used_bytes{transport="shm"}'] < seen['h3_slab_high_water_bytes{transport="shm"}']
    assert seen['h3_transport_reservations_total{transport="shm"}'] == 2
    assert seen['h3_transport_lapses_total{transport="shm"}'] == 1
    assert seen['h3_transport_sweeps_total{transport="shm"}'] == 1
