"""How fast a transformer's weights come from files to the device, by how many files are read at a time.

    python -m benchmarks.loading --layers 6 --json benchmarks/results/loading.json

A checkpoint of so many blocks at the released sizes is made up and written, in files of at most `--shard-gb`; all of it
is in the page cache then. Beside it: its bytes read into memory that is there already, and diffusers' own loading.
`host` is the most memory of its own, without the mapped files, that loading took. `--tiny` only shows that it runs.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from benchmarks.device import Device
from benchmarks.figures import provenance, write_json
from benchmarks.released import write_released
from shared_runtime import weights
from shared_runtime.tiny import build_tiny
from shared_runtime.weights import load_transformer, weight_bytes

PART = "transformer"
LOOK_S = 0.005


class OwnMemory:
    """The most anonymous memory of this process while the context is open, over what there was before. GiB."""

    def __enter__(self) -> "OwnMemory":
        self._before, self.most = _anonymous(), 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(LOOK_S):
            self.most = max(self.most, _anonymous() - self._before)


def _anonymous() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 2**20


def write_weights(folder: Path, device: torch.device, shard: str) -> int:
    """Made-up weights into the folder of the partition; their bytes."""
    model = load_transformer(folder, PART, device, dummy=True)
    model.save_pretrained(folder / PART, max_shard_size=shard)
    return weight_bytes(model)


def read_plainly(folder: Path) -> None:
    """Every file once, into a buffer that stays."""
    buffer = bytearray(64 * 2**20)
    for file in sorted((folder / PART).glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def load_ours(folder: Path, device: torch.device, readers: int) -> None:
    """As a rank does it."""
    weights.READERS = readers
    load_transformer(folder, PART, device)


def load_stock(folder: Path, device: torch.device) -> None:
    """As diffusers does it when it is told the device."""
    MiniMaxH3Transformer3DModel.from_pretrained(folder / PART, torch_dtype=torch.bfloat16, device_map=str(device))


def measured(device: Device, work: Callable[[], None], nbytes: int, repeats: int) -> dict[str, Any]:
    """The best of some runs after one that does not count: what else the machine does only makes it slower."""
    with OwnMemory() as memory:
        seconds = min(device.seconds(work, repeats))
    return {"s": round(seconds, 3), "gb_per_s": round(nbytes / seconds / 1e9, 2), "host_gib": round(memory.most, 2)}


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description="Weights from files to the device.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--shard-gb", type=float, default=1.0)
    parser.add_argument("--readers", type=int, action="append", help="repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = Device.best()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if device.is_gpu else None) as name:
        folder = Path(name) / "model"
        shard = "20KB" if arguments.tiny else f"{arguments.shard_gb}GB"
        if arguments.tiny:
            build_tiny(folder)
        else:
            write_released(folder, arguments.layers)
        nbytes = write_weights(folder, device.torch_device, shard)
        ways: dict[str, Callable[[], None]] = {"plain read": lambda: read_plainly(folder)}
        ways["diffusers"] = lambda: load_stock(folder, device.torch_device)
        for readers in arguments.readers or (1, 2, 4, 8):
            ways[f"{readers} at a time"] = lambda readers=readers: load_ours(folder, device.torch_device, readers)
        found = {}
        for way, work in ways.items():
            found[way] = measured(device, work, nbytes, arguments.repeats)
            print(f"{way:14s} {found[way]}", flush=True)
    if arguments.json is not None:
        write_json(
            arguments.json, {**provenance(sys.argv), **device.facts(), "gb": round(nbytes / 1e9, 2), "ways": found}
        )


if __name__ == "__main__":
    main()
