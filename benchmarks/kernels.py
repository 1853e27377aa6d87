"""Which kernels a piece of work spends its time in, grouped by what they do."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("communication", ("nccl",)),
    ("attention", ("flash", "fmha", "sdpa", "cudnn_generated")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma")),
    ("compiled", ("triton",)),
    ("copies", ("memcpy", "memset", "copy", "cat")),
)
"""A kernel belongs to the first kind that a part of its name names."""
LONGEST = 12


def kernel_times(work: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds on the GPU by kind of kernel, and of the kernels that take longest; empty without a GPU."""
    if not torch.cuda.is_available():
        work()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    names: Counter[str] = Counter()
    for event in profiler.key_averages():
        names[event.key] += event.self_device_time_total / 1000
    kinds: Counter[str] = Counter()
    for name, spent in names.items():
        kinds[_kind(name)] += spent
    return {
        "ms_by_kind": {kind: round(spent, 2) for kind, spent in kinds.most_common()},
        "longest_ms": {name[:90]: round(spent, 2) for name, spent in names.most_common(LONGEST)},
    }


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS if any(part in lower for part in parts)), "other")
