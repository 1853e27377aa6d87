"""What `/metrics` says of a service, and that every name is explained."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from shared_runtime.metrics import exposition, new_registry
from shared_runtime.transport.accounts import SlabCollector, TransportAccounts
from shared_runtime.transport.slab import SlabStats
from shared_schema.health import Health, RankHealth

README = Path(__file__).parents[2] / "README.md"
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


def test_every_name_is_explained() -> None:
    registry = new_registry("diffusion", lambda: Health(status="healthy"))
    TransportAccounts(registry)
    registry.register(SlabCollector("shm", lambda: SlabStats(*[0] * 8)))
    text = README.read_text(encoding="utf-8")
    families = text_string_to_metric_families(exposition(registry).decode())
    spelled = {"counter": "_total", "info": "_info"}
    names = sorted(each.name + spelled.get(each.type, "") for each in families if each.name.startswith("h3_"))
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in text]
