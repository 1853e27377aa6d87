"""Timing and memory of one device, and what it can do at most: for benchmarks that run a model without services."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """Where a benchmark runs."""

    torch_device: torch.device

    @classmethod
    def best(cls) -> "Device":
        """The first GPU, else the CPU, where figures only prove that the benchmark runs."""
        return cls(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.torch_device.type == "cuda"

    def wait(self) -> None:
        """Until everything queued is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def seconds(self, work: Callable[[], object], repeats: int, warm_ups: int = 1) -> list[float]:
        """Wall time of each of `repeats` runs, after `warm_ups` that do not count."""
        taken: list[float] = []
        for _ in range(warm_ups + repeats):
            self.wait()
            begun = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - begun)
        return taken[warm_ups:]

    def first_and_then(self, work: Callable[[], object], repeats: int) -> tuple[float, list[float]]:
        """Wall time of the first run, in which kernels are compiled, and of those after it."""
        (first,) = self.seconds(work, 1, warm_ups=0)
        return first, self.seconds(work, repeats, warm_ups=0)

    def reset_peak(self) -> None:
        """Begin a new peak, and give back what is only cached."""
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch_device)

    def memory(self) -> dict[str, float]:
        """GiB held now and at the peak."""
        if not self.is_gpu:
            return {}
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return {"held_gib": round(held / 2**30, 2), "peak_gib": round(peak / 2**30, 2)}

    def matmul_tflops(self, size: int) -> float:
        """Of a BF16 product of random matrices."""
        a, b = (torch.randn(size, size, device=self.torch_device, dtype=torch.bfloat16) for _ in range(2))
        seconds = self.seconds(lambda: [torch.mm(a, b) for _ in range(10)], 3)
        return round(10 * 2 * size**3 / statistics.median(seconds) / 1e12, 1)

    def facts(self) -> dict[str, Any]:
        """What the figures belong to, beside the host's."""
        if not self.is_gpu:
            return {"device": "cpu", "torch": torch.__version__}
        return {
            "device": torch.cuda.get_device_name(self.torch_device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "matmul_tflops": self.matmul_tflops(8192),
        }


def series(seconds: list[float]) -> dict[str, Any]:
    """A few runs of one thing."""
    return {"s": round(statistics.median(seconds), 4), "all_s": [round(each, 4) for each in seconds]}


def relative_error(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the whole tensor: norm of the difference over the norm of what is wanted."""
    wanted = wanted.double()
    return float((made.double() - wanted).norm() / wanted.norm())
