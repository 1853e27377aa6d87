"""How full GPUs are comes from a thread: whoever asks never waits for the driver."""

import threading
import time

from prometheus_client import CollectorRegistry

from shared_runtime.gpu_memory import Driver, GpuMemory, Memory
from shared_runtime.gpus import installed_gpus
from shared_runtime.metrics import exposition


def test_a_driver_that_hangs_keeps_nobody_waiting() -> None:
    registry, held = CollectorRegistry(), threading.Event()

    def hanging() -> dict[str, Memory]:
        held.wait(60)
        return {"GPU-1": Memory(1, 2)}

    memory = GpuMemory(hanging)
    registry.register(memory)
    begun = time.monotonic()
    assert b"GPU-1" not in exposition(registry)
    assert time.monotonic() - begun < 30
    held.set()
    while b'h3_gpu_memory_used_bytes{gpu="GPU-1"} 1.0' not in exposition(registry):
        assert time.monotonic() - begun < 90
        time.sleep(0.01)
    assert b'h3_gpu_memory_total_bytes{gpu="GPU-1"} 2.0' in exposition(registry)
    memory.close()


def test_the_driver_tells_of_every_gpu_of_this_machine() -> None:
    gpus = installed_gpus()
    if not gpus:
        assert b"{gpu=" not in exposition(_of_nothing())
        return
    found = Driver(gpus)()
    assert found.keys() == {gpu.uuid for gpu in gpus}
    assert all(0 < memory.used < memory.total for memory in found.values())


def _of_nothing() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(GpuMemory.of(()))
    return registry
