"""How full the GPUs of a service are, asked of the driver's management library now and then. API process; no torch.

A thread asks, because a driver in trouble may take its time, and neither a scrape nor a request may wait for it.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared_runtime.gpus import LIBRARY, Gpu, MemoryInfo

PERIOD_S = 5.0


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, of all processes together."""

    used: int
    total: int


Reader = Callable[[], Mapping[str, Memory]]
"""Memory by GPU UUID."""


class Driver:
    """The driver's management library, opened once."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._library = ctypes.CDLL(LIBRARY)
        self._library.nvmlInit_v2()

    def __call__(self) -> dict[str, Memory]:
        """What it says now; a GPU that does not answer is left out."""
        found = {}
        for gpu in self._gpus:
            handle, info = ctypes.c_void_p(), MemoryInfo()
            if self._library.nvmlDeviceGetHandleByUUID(gpu.uuid.encode(), ctypes.byref(handle)) != 0:
                continue
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info)) == 0:
                found[gpu.uuid] = Memory(info.used, info.total)
        return found


class GpuMemory(Collector):
    """What the reader said last, for `/metrics`. Without a reader there are no GPUs, and nothing is shown."""

    def __init__(self, read: Reader | None) -> None:
        self._now: Mapping[str, Memory] = {}
        self._over = threading.Event()
        if read is not None:
            threading.Thread(target=self._watch, args=(read,), name="gpu memory", daemon=True).start()

    @classmethod
    def of(cls, gpus: Sequence[Gpu]) -> "GpuMemory":
        """Of these GPUs, which the driver's library named."""
        return cls(Driver(gpus) if gpus else None)

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _watch(self, read: Reader) -> None:
        while True:
            self._now = read()
            if self._over.wait(PERIOD_S):
                return

    def collect(self) -> Iterator[Metric]:
        """Two gauges for each GPU."""
        used = GaugeMetricFamily("h3_gpu_memory_used_bytes", "Of the whole GPU, by whomever.", labels=["gpu"])
        total = GaugeMetricFamily("h3_gpu_memory_total_bytes", "Of the whole GPU.", labels=["gpu"])
        for uuid, memory in self._now.items():
            used.add_metric([uuid], memory.used)
            total.add_metric([uuid], memory.total)
        yield used
        yield total
