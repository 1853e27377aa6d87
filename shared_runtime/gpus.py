"""How many NVIDIA GPUs a service may use, found through the driver's management library: no torch, no CUDA context."""

import ctypes

LIBRARY = "libnvidia-ml.so.1"


def count_gpus() -> int:
    """GPUs that the driver shows to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return 0
    if driver.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint(0)
        return count.value if driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        driver.nvmlShutdown()


def visible_gpus(mask: str | None, installed: int) -> int:
    """GPUs that CUDA will number from 0 under `CUDA_VISIBLE_DEVICES`; entries after the first invalid one do not count.

    Args:
        mask: the variable's value, None when it is not set.
        installed: `count_gpus()`.
    """
    if mask is None or installed == 0:
        return installed
    seen: list[str] = []
    for entry in (part.strip() for part in mask.split(",")):
        by_index = entry.isdecimal() and int(entry) < installed
        if not (by_index or entry.startswith(("GPU-", "MIG-"))) or entry in seen:
            break
        seen.append(entry)
    return len(seen)
