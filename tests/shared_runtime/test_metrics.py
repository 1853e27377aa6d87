"""What `/metrics` says of a service."""

from shared_runtime.metrics import exposition, new_registry
from shared_runtime.transport.accounts import TransportAccounts
from shared_schema.health import Health, RankHealth

RANK = RankHealth(name="encoder-tp0", pid=1, state="ready", beat_age_s=0.5, device="cpu")
BUSY = RANK.model_copy(update={"state": "busy", "beat_age_s": 2.5})


def samples(body: bytes) -> dict[str, float]:
    """Values by name and labels, as they are written."""
    lines = [line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_readiness_and_ranks_are_looked_at_when_asked() -> None:
    now = Health(status="unhealthy", reason="the ranks are not ready", restarts=2)
    registry = new_registry("encoder", lambda: now)
    seen = samples(exposition(registry))
    assert (seen["h3_ready"], seen['h3_ranks{state="ready"}'], seen["h3_rank_beat_age_seconds"]) == (0, 0, 0)
    assert seen["h3_rank_group_restarts_total"] == 2
    assert seen['h3_service_info{schema_version="1",service="encoder"}'] == 1
    now = Health(status="healthy", ranks=(RANK, BUSY, BUSY))
    seen = samples(exposition(registry))
    assert (seen["h3_ready"], seen['h3_ranks{state="busy"}'], seen["h3_rank_beat_age_seconds"]) == (1, 2, 2.5)


def test_two_services_in_one_process_count_apart() -> None:
    first, second = (new_registry("encoder", lambda: Health(status="healthy")) for _ in range(2))
    TransportAccounts(first).pushed("shm", 10, 0.1)
    TransportAccounts(second)
    assert samples(exposition(first))['h3_transport_bytes_total{transport="shm"}'] == 10
    assert 'h3_transport_bytes_total{transport="shm"}' not in samples(exposition(second))
