"""What each way to save memory costs: seconds of a DiT forward and GPU memory, beside stock diffusers, as one table.

    python -m benchmarks.memory --layers 50 --size 768x1344 --frames 124 --json benchmarks/results/memory.json

Weights are made up at the released sizes. Every mode runs in a process of its own, loaded and fitted as a diffusion
rank does it, over the same weights and inputs; errors and cosines are to stock's outputs. `--mode` names some of them,
and "stock, groups": diffusers' own group offloading, a block a group, the next one copied while one computes.
`--tiny --device cpu` proves on a CPU that the benchmark runs.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from benchmarks.denoise import Case
from benchmarks.device import Device, relative_error, series
from benchmarks.figures import write_json
from benchmarks.modes import Silent, parser_of, rank_settings, run
from diffusion_service.fitting import Fitter, held, load_partition
from diffusion_service.model.attention import choose
from diffusion_service.model.dit import Dit, Moment, Rows
from diffusion_service.model.offload import StreamedBlocks
from diffusion_service.model.turns import Turns
from shared_runtime.device_memory import locker_for
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.weights import load_transformer

STOCK, GROUPS = "stock", "stock, groups"
OUTPUTS = "outputs.pt"
Outputs = tuple[torch.Tensor, torch.Tensor]


class Bench:
    """One mode in this process."""

    def __init__(self, arguments: argparse.Namespace, mode: str, folder: Path) -> None:
        self._arguments = arguments
        self._mode = mode
        self._folder = folder
        self._case = Case.parse(f"{arguments.size}x{arguments.frames}:{arguments.layers}")
        self._device = Device(torch.device(arguments.device))
        self.figures: dict[str, Any] = {}

    def run(self) -> Outputs:
        """Load, run, and leave the figures."""
        made = self._stock() if self._mode in (STOCK, GROUPS) else self._ours()
        self.figures["device"] = self._device.facts()["device"]
        return made

    @torch.no_grad()
    def _stock(self) -> Outputs:
        model = load_transformer(self._folder, "transformer", self._device.torch_device, dummy=True)
        given = self._case.inputs(model.config, self._device.torch_device)
        if self._mode == GROUPS:
            self._in_groups(model)
        return self._measure(lambda: model(**given, return_dict=False))

    def _in_groups(self, model: Any) -> None:
        # From where it was made, a tensor at a time: page-locked copies are rounded up to powers of two (90 GiB of 62),
        # and another copy of the model beside them is more than a host of 126 GiB has.
        begun = time.perf_counter()
        how = {"num_blocks_per_group": 1, "use_stream": self._device.is_gpu, "record_stream": self._device.is_gpu}
        model.enable_group_offload(self._device.torch_device, offload_type="block_level", **how)
        self.figures |= {"begin_s": round(time.perf_counter() - begun, 1), "loaded": self._device.memory()}

    def _ours(self) -> Outputs:
        device = self._device.torch_device
        comm = RankComm(RankSpec("bench", 0, Mesh(), "0" if self._device.is_gpu else "cpu"), device)
        settings = rank_settings(self._arguments, self._mode, self._folder, self._folder / "none")
        transformer = load_partition(settings, "transformer", comm)
        dtype = next(transformer.transformer_blocks.parameters()).dtype
        backend, turns = choose(None, device, dtype), Turns()
        fitter = Fitter(settings.stage, backend, comm, locker_for(device), turns)
        dit = fitter.fit("transformer", transformer)
        self.figures |= {"attention": backend, "loaded": self._device.memory()}
        fitter.compile("transformer", dit, Silent())
        turns.take("transformer")
        holdings = held({"transformer": transformer}, {"transformer": dit}, turns)
        self.figures |= {"resident_gib": _gib(holdings.resident), "offloaded_gib": _gib(holdings.offloaded)}
        made = self._measure(self._step(dit))
        if turns.resident_bytes:
            seconds = self._device.seconds(lambda: (turns.take("decoders"), turns.take("transformer")), 2)
            self.figures["turn_s"] = round(statistics.median(seconds), 4)
        if isinstance(dit.blocks, StreamedBlocks):
            self.figures["copies"] = self._copies(dit, dit.blocks)
        return made

    def _step(self, dit: Dit) -> Any:
        given = self._case.inputs(dit.transformer.config, self._device.torch_device)
        schedule = [Moment(given["timestep"], given["timestep_indices"])]
        denoising = dit.begin(given["encoder_hidden_states"], Rows.from_layout(given), schedule)
        return lambda: denoising.step(0, given["hidden_states"], given["audio_hidden_states"])

    def _measure(self, work: Any) -> Outputs:
        made, repeats = list[Outputs](), self._arguments.repeats
        self._device.reset_peak()
        first, later = self._device.first_and_then(lambda: made.__setitem__(slice(None), [work()]), repeats)
        self.figures |= {**series(later), "first_s": round(first, 2), **self._device.memory()}
        ((video, audio),) = made
        return video.cpu(), audio.cpu()

    def _copies(self, dit: Dit, blocks: StreamedBlocks) -> dict[str, Any]:
        """What copying the blocks takes by itself, and how much of that a forward waits for."""
        alone = statistics.median(self._device.seconds(lambda: _drain(blocks), 2))
        figures: dict[str, Any] = {
            "alone_s": round(alone, 4),
            "gb_per_s": round(blocks.offloaded_bytes / alone / 1e9, 2),
        }
        if self._device.is_gpu:
            step = self._step(dit)
            step()
            blocks.waited = []
            self._device.seconds(step, 1, warm_ups=0)
            waited = sum(before.elapsed_time(after) for before, after in blocks.waited) / 1e3
            figures |= {"waited_s": round(waited, 4), "hidden": round(1 - waited / alone, 4)}
        return figures


def _drain(blocks: StreamedBlocks) -> None:
    for _ in blocks:
        pass


def _gib(count: int) -> float:
    return round(count / 2**30, 2)


def run_one(arguments: argparse.Namespace, mode: str, folder: Path, out: Path) -> None:
    """What a child does: one mode, figures and outputs into `out`."""
    bench = Bench(arguments, mode, folder)
    torch.save(bench.run(), out / OUTPUTS)
    write_json(out / "figures.json", bench.figures)


def compare(mode: str, out: Path, modes: dict[str, Any]) -> None:
    """Add to a mode's figures what its outputs and seconds are to stock's."""
    stock = out.parent / STOCK / OUTPUTS
    if mode != STOCK and stock.exists():
        made, wanted = torch.load(out / OUTPUTS), torch.load(stock)
        modes[mode] |= _compared(made, wanted, modes[mode]["s"] / modes[STOCK]["s"])


def _compared(made: Outputs, wanted: Outputs, ratio: float) -> dict[str, Any]:
    return {
        "of_stock": round(ratio, 4),
        "error_to_stock": [relative_error(one, other) for one, other in zip(made, wanted, strict=True)],
        "cosine_to_stock": [
            float(cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))
            for one, other in zip(made, wanted, strict=True)
        ],
        "finite": all(bool(each.isfinite().all()) for each in made),
    }


def table(modes: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| Mode | s a forward | of stock | GPU, held / peak GiB | on the host GiB | copy hidden | cosine to stock |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, found in modes.items():
        if "failed" in found:
            lines.append(f"| {mode} | failed ({found['failed']}) | | | | | |")
            continue
        cells = [
            found["s"],
            found.get("of_stock", ""),
            f"{found.get('held_gib', '-')} / {found.get('peak_gib', '-')}",
            found.get("offloaded_gib", ""),
            found.get("copies", {}).get("hidden", ""),
            f"{min(found['cosine_to_stock']):.5f}" if "cosine_to_stock" in found else "",
        ]
        lines.append(f"| {mode} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = parser_of("A DiT forward in every mode that saves memory; stock always runs.", also=[GROUPS])
    parser.add_argument("--repeats", type=int, default=2)
    run(parser, run_one, table, before=[STOCK], finish=compare)
