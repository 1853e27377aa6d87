"""Which NVIDIA GPUs a service may use, found through the driver's management library: no torch, no CUDA context."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96
"""Bytes of the library's longest UUID or name."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice that a mask names."""

    uuid: str
    """`GPU-` and 32 hex digits: the same in every process and container of the machine, whatever its number there."""
    name: str
    memory_bytes: int = 0
    """All that it has; 0 where that is not known."""


class MemoryInfo(ctypes.Structure):
    """What the library says of a GPU's memory, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def installed_gpus() -> tuple[Gpu, ...]:
    """GPUs that the driver shows to this process, in PCI order; none without a driver."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return ()
    if driver.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint(0)
        if driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        return tuple(_gpu(driver, index) for index in range(count.value))
    finally:
        driver.nvmlShutdown()


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    uuid, name = ctypes.create_string_buffer(_TEXT), ctypes.create_string_buffer(_TEXT)
    driver.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_TEXT))
    driver.nvmlDeviceGetName(handle, name, ctypes.c_uint(_TEXT))
    memory = MemoryInfo()
    known = driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    return Gpu(uuid.value.decode(), name.value.decode(), memory.total if known else 0)


def visible_gpus(mask: str | None, installed: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """GPUs that CUDA will number from 0 under `CUDA_VISIBLE_DEVICES`; entries after the first invalid one do not count.

    Args:
        mask: the variable's value, None when it is not set.
        installed: `installed_gpus()`.
    """
    if mask is None or not installed:
        return tuple(installed)
    seen: list[Gpu] = []
    for entry in (part.strip() for part in mask.split(",")):
        gpu = _named(entry, installed)
        if gpu is None or gpu in seen:
            break
        seen.append(gpu)
    return tuple(seen)


def _named(entry: str, installed: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return installed[int(entry)] if int(entry) < len(installed) else None
    if entry.startswith("MIG-"):
        return Gpu(entry, "MIG slice")
    # CUDA takes the beginning of a UUID, if only one GPU has it.
    matching = [gpu for gpu in installed if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None
