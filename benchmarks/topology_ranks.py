"""What runs in the ranks of `benchmarks.topologies`: the services' own parts on some of the group's ranks. Torch.

One group is as large as there are devices; a measurement takes the first ranks of it as a mesh of their own, so that
weights which several meshes share are made once.
"""

import copy
import gc
import hashlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import nn

from benchmarks.decode import PIXEL_MEAN, PIXEL_STD
from benchmarks.denoise import Case, Outputs
from benchmarks.device import Device, relative_error, series
from benchmarks.kernels import kernel_times
from diffusion_service.fitting import Fitter
from diffusion_service.model.attention import choose
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Dit, Moment, Rows
from diffusion_service.model.turns import Turns
from diffusion_service.parallel.tensor import DIT_PLAN
from diffusion_service.parallel.vae_tiles import video_decoder
from diffusion_service.sampling.decode import Chunks
from encoder_service.commands import Encode, EncoderRankSettings, Push, Pushed
from encoder_service.worker import EncoderRank
from shared_runtime.compiling import compile_now
from shared_runtime.logs import set_up_logging
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh, RankSpec
from shared_runtime.ranks.worker import Beater, TaskHandle, rank_main
from shared_runtime.sharding import Sharding
from shared_runtime.weights import load_transformer, load_video_vae, weight_bytes
from shared_schema.deploy.model import DiffusionStage
from shared_schema.encode import EncodeRequest, InlineLanding

logger = logging.getLogger(__name__)
GIB = 2**30


@dataclass(frozen=True)
class Settings:
    """What the ranks of a benchmark need to know."""

    folder: Path
    """Of configs, with or without weights."""
    scratch: Path
    """Outputs of one rank lie here for later groups."""
    stage: DiffusionStage


@dataclass(frozen=True)
class Links:
    """How fast collectives of so many bytes a rank are."""

    nbytes: int
    repeats: int = 5


@dataclass(frozen=True)
class Forward:
    """A DiT forward of a case (see `benchmarks.denoise`)."""

    mesh: Mesh
    case: str
    repeats: int
    profiled: bool = False
    eager: bool = False


@dataclass(frozen=True)
class Decode:
    """The video decode of a clip on so many ranks."""

    ranks: int
    height: int
    width: int
    frames: int
    repeats: int


@dataclass(frozen=True)
class EncodeOnce:
    """One request through the encoder's ranks."""

    name: str
    settings: EncoderRankSettings
    request: EncodeRequest
    files: tuple[Path, ...]
    repeats: int


@dataclass(frozen=True)
class Figures:
    """What the leader measured."""

    values: dict[str, Any]


class BenchRank:
    """Does what a cell says, on one rank."""

    facts = None

    def __init__(self, comm: RankComm, settings: Settings, beater: Beater) -> None:
        self._comm = comm
        self._settings = settings
        self._beater = beater
        self._device = Device(comm.device)
        self._meshes: dict[Mesh, RankComm | None] = {}
        self._dits: dict[tuple[Mesh, bool], Dit] = {}
        self._whole: Any = None
        """The DiT with nothing cut, which all meshes without tensor parallelism share."""
        self._outputs: dict[str, dict[str, Outputs]] = {}
        """By case and mesh."""
        self._chunks: Chunks | None = None
        self._frames: torch.Tensor | None = None
        self._encoders: dict[int, EncoderRank] = {}
        self._payloads: dict[str, dict[str, torch.Tensor]] = {}

    def handle(self, command: object, task: TaskHandle) -> object:
        """One measurement; None on ranks that have no part in it."""
        match command:
            case Links():
                return self._links(command)
            case Forward():
                return self._forward(command, task)
            case Decode():
                return self._decode(command, task)
            case EncodeOnce():
                return self._encode(command, task)
            case _:
                raise TypeError(f"a rank of a benchmark does not know {type(command).__name__}")

    def _mesh(self, mesh: Mesh) -> RankComm | None:
        if mesh not in self._meshes:
            self._meshes[mesh] = self._comm.split(mesh)
        return self._meshes[mesh]

    def _timed(self, comm: RankComm, work: Callable[[], object], repeats: int) -> list[float]:
        """Wall time of each of `repeats` runs that all ranks begin together."""
        taken = []
        for _ in range(repeats):
            self._device.wait()
            comm.any(False)
            taken += self._device.seconds(work, 1, warm_ups=0)
        return taken

    # Collectives

    def _links(self, command: Links) -> Figures:
        size, world = command.nbytes // 4, self._comm.world
        sent = torch.randn(size, device=self._comm.device)
        received = torch.empty_like(sent)
        ways: dict[str, Callable[[], object]] = {
            "all_to_all": lambda: dist.all_to_all_single(received, sent, group=world),
            "all_reduce": lambda: dist.all_reduce(received, group=world),
            "nothing": lambda: self._comm.any(False),
        }
        figures: dict[str, Any] = {"mib_a_rank": command.nbytes >> 20}
        for name, work in ways.items():
            self._timed(self._comm, work, 2)
            best = min(self._timed(self._comm, work, command.repeats))
            figures[f"{name}_ms"] = round(best * 1e3, 3)
        # What leaves a rank: its share of an exchange, and twice as much of a sum over a ring.
        leaving = command.nbytes * (self._comm.world_size - 1) / self._comm.world_size / 1e6
        figures["all_to_all_gb_per_s"] = round(leaving / figures["all_to_all_ms"], 1)
        figures["all_reduce_gb_per_s"] = round(2 * leaving / figures["all_reduce_ms"], 1)
        return Figures(figures)

    # The transformer

    def _forward(self, command: Forward, task: TaskHandle) -> Figures | None:
        comm = self._mesh(command.mesh)
        if comm is None:
            return None
        begun = time.perf_counter()
        dit = self._dit(command, comm, task.beat)
        ready = time.perf_counter() - begun
        case, config = Case.parse(command.case), dit.transformer.config
        given = case.inputs(config, comm.device)
        schedule = [Moment(given["timestep"], given["timestep_indices"])] * 4
        denoising = dit.begin(given["encoder_hidden_states"], Rows.from_layout(given), schedule)
        made: list[Outputs] = []

        def step() -> None:
            made[:] = [denoising.step(0, given["hidden_states"], given["audio_hidden_states"])]

        self._device.reset_peak()
        before = self._device.memory().get("held_gib", 0.0)
        first = self._timed(comm, step, 1)
        figures: dict[str, Any] = {
            "rows": case.rows,
            "ready_s": round(ready, 1),
            "first_s": [round(s, 4) for s in first],
        }
        figures |= series(self._timed(comm, step, command.repeats))
        held = (weight_bytes(dit.transformer) + dit.modulation.resident_bytes) / GIB
        peak = self._device.memory().get("peak_gib", 0.0) - before
        figures |= {"weights_gib": round(held, 2), "beside_them_gib": round(peak, 2)}
        rate = case.flop(config) / figures["s"] / comm.world_size / 1e12
        figures["tflops_a_gpu"] = round(rate, 1)
        ((video, audio),) = made
        if comm.is_leader:
            figures |= self._compared(command, (video.cpu(), audio.cpu()))
        if command.profiled:
            figures |= self._profile(comm, step, figures["s"])
        return Figures(figures)

    def _profile(self, comm: RankComm, step: Callable[[], None], seconds: float) -> dict[str, Any]:
        """Kernels of the leader; the others take part and are not looked at."""
        comm.any(False)
        if not comm.is_leader:
            step()
            self._device.wait()
            return {}
        kinds = kernel_times(step).get("ms_by_kind", {})
        share = kinds.get("communication", 0.0) / 1e3 / seconds
        return {"ms_by_kind": kinds, "communication_share": round(share, 4)}

    def _compared(self, command: Forward, outputs: Outputs) -> dict[str, Any]:
        """Errors to one rank: of this mesh, or of the ones before it once one rank has made the case."""
        kept = self._settings.scratch / f"forward_{command.case.replace(':', '_')}.pt"
        done = self._outputs.setdefault(command.case, {})
        if command.mesh.world_size == 1:
            torch.save(outputs, kept)
            return {"errors_of": {name: _errors(made, outputs) for name, made in done.items()}}
        done[name_of(command.mesh)] = outputs
        return {"errors": _errors(outputs, torch.load(kept))} if kept.exists() else {}

    def _dit(self, command: Forward, comm: RankComm, beat: Callable[[], None]) -> Dit:
        key = command.mesh, command.eager
        if key not in self._dits:
            transformer = self._transformer(command.mesh, comm)
            beat()
            dtype = next(transformer.transformer_blocks.parameters()).dtype
            attention = choose(None, comm.device, dtype)
            stage = self._settings.stage.model_copy(update={"enforce_eager": command.eager})
            fitter = Fitter(stage, attention, comm, None, Turns())
            self._dits[key] = fitter.fit("transformer", transformer)
            fitter.compile("transformer", self._dits[key], self._beater)
        return self._dits[key]

    def _transformer(self, mesh: Mesh, comm: RankComm) -> Any:
        """One that nobody else changes; its weights are shared where they are whole."""
        if mesh.tp > 1:
            self._dits.clear()
            self._whole = None
            self._clear()
            return self._load(Sharding(DIT_PLAN, comm))
        if self._whole is None:
            self._whole = self._load(None)
        same = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in self._whole.parameters()}
        return copy.deepcopy(self._whole, same)

    def _load(self, sharding: Sharding | None) -> Any:
        begun = time.perf_counter()
        folder, dummy = self._settings.folder, self._settings.stage.dummy
        loaded = load_transformer(folder, "transformer", self._comm.device, sharding, dummy=dummy)
        self._device.wait()
        logger.info("transformer there after %.1f s", time.perf_counter() - begun)
        return loaded

    def _clear(self) -> None:
        gc.collect()
        self._device.reset_peak()

    # The decoder

    def _decode(self, command: Decode, task: TaskHandle) -> Figures | None:
        comm = self._mesh(Mesh(ulysses=command.ranks))
        chunks = self._decoder(task.beat)
        if comm is None:
            return None
        decoder = video_decoder(chunks, comm, command.ranks)
        random = torch.Generator().manual_seed(0)
        shape = (1, 24, (command.frames - 5) // 17 * 5 + 2, command.height // 16, command.width // 16)
        latents = torch.randn(shape, generator=random).to(comm.device)
        pieces: list[torch.Tensor] = []

        def decode() -> None:
            pieces[:] = [each for each in decoder.decode(latents, command.frames, task.beat) if each is not None]

        first = self._timed(comm, decode, 1)
        figures = {"first_s": [round(each, 4) for each in first], **series(self._timed(comm, decode, command.repeats))}
        if comm.is_leader:
            figures |= self._seen(torch.cat(pieces), command.ranks)
        return Figures({**figures, **self._device.memory()})

    def _decoder(self, beat: Callable[[], None]) -> Chunks:
        if self._chunks is None:
            vae = load_video_vae(self._settings.folder, "decoder", self._comm.device, dummy=self._settings.stage.dummy)
            beat()
            self._chunks = Chunks(vae, PIXEL_MEAN, PIXEL_STD, "fp16" if self._device.is_gpu else "fp32")
            if self._device.is_gpu:
                compile_blocks(vae.decoder.transformer_blocks)
                compile_now("the video decoder", self._chunks.warm_up, self._settings.stage, self._beater.beat)
        return self._chunks

    def _seen(self, frames: torch.Tensor, ranks: int) -> dict[str, Any]:
        """Digest, and how far the frames are from those of one rank."""
        figures: dict[str, Any] = {"sha256": hashlib.sha256(frames.numpy().data).hexdigest()[:16]}
        if ranks == 1:
            self._frames = frames
        elif self._frames is not None:
            apart = (frames.int() - self._frames.int()).abs()
            figures |= {
                "bit_equal": bool(torch.equal(frames, self._frames)),
                "largest_difference": int(apart.max()),
                "share_that_differs": float((apart > 0).float().mean()),
            }
        return figures

    # The encoder

    def _encode(self, command: EncodeOnce, task: TaskHandle) -> Figures | None:
        ranks = command.settings.stage.world_size
        comm = self._mesh(Mesh(tp=ranks))
        if ranks not in self._encoders:
            self._encoders.clear()
            self._clear()
        if comm is None:
            return None
        begun = time.perf_counter()
        if ranks not in self._encoders:
            self._encoders[ranks] = EncoderRank(comm, command.settings, self._beater)
            self._device.wait()
        loaded, rank, own = time.perf_counter() - begun, self._encoders[ranks], replace(task, comm=comm)
        self._device.reset_peak()
        pushed: list[Any] = []

        def encode() -> None:
            name = f"{command.name}-{ranks}-{len(pushed)}"
            rank.handle(Encode(name, command.request, command.files), own)
            pushed.append(rank.handle(Push(name, InlineLanding()), own))

        first = self._timed(comm, encode, 1)
        figures: dict[str, Any] = {"ready_s": round(loaded, 1), "first_s": [round(each, 4) for each in first]}
        figures |= {**series(self._timed(comm, encode, command.repeats)), **self._device.memory()}
        figures["weights_gib"] = round(rank.facts.weight_bytes / GIB, 2)
        if comm.is_leader:
            figures |= self._held(command.name, pushed[-1], ranks)
        return Figures(figures)

    def _held(self, name: str, pushed: Pushed, ranks: int) -> dict[str, Any]:
        assert pushed.blob is not None
        slots = load(pushed.blob)
        if ranks == 1:
            self._payloads[name] = slots
        wanted = self._payloads.get(name)
        if wanted is None or ranks == 1:
            return {"bytes": len(pushed.blob)}
        filled = [slot for slot in wanted if wanted[slot].numel()]
        return {
            "bytes": len(pushed.blob),
            "bit_equal": [slot for slot in filled if torch.equal(slots[slot], wanted[slot])],
            "errors": {
                slot: [_short(relative_error(slots[slot], wanted[slot])), _largest(slots[slot], wanted[slot])]
                for slot in filled
                if not torch.equal(slots[slot], wanted[slot])
            },
        }


def name_of(mesh: Mesh) -> str:
    """`tp2 x u2`."""
    parts = [f"tp{mesh.tp}" if mesh.tp > 1 else "", f"u{mesh.ulysses}" if mesh.ulysses > 1 else ""]
    return " x ".join(part for part in parts if part) or "one GPU"


def _errors(made: Outputs, wanted: Outputs) -> dict[str, list[float]]:
    """Of picture and sound: relative error, and the largest difference."""
    pairs = zip(("video", "audio"), made, wanted, strict=True)
    return {name: [_short(relative_error(one, other)), _largest(one, other)] for name, one, other in pairs}


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return _short(float((one.double() - other.double()).abs().max()))


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def build(comm: RankComm, settings: object, beater: Beater) -> BenchRank:
    """See `shared_runtime.ranks.worker.BuildService`."""
    assert isinstance(settings, Settings)
    set_up_logging("info", comm.spec.name)
    torch.set_grad_enabled(False)
    return BenchRank(comm, settings, beater)


def main(spec: RankSpec, settings: object, end: socket.socket) -> None:
    """Entry of the rank process."""
    rank_main(build, spec, settings, end)
