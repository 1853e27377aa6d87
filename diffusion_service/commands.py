"""What the diffusion API process asks of its ranks, and what they tell on the way. Frozen, no torch."""

from dataclasses import dataclass
from pathlib import Path

from diffusion_service.adapters.adapter import Adapter
from shared_runtime.ranks.messages import RankFacts
from shared_schema.deploy.model import DiffusionStage, EncodePrecision
from shared_schema.deploy.settings import LogFormat, LogLevel
from shared_schema.encode import EncodeRequest, ShmLanding
from shared_schema.encoder_output import Manifest
from shared_schema.quality import StepCache
from shared_schema.tasks import Task
from shared_schema.videos import Execution, VideoOutput


@dataclass(frozen=True)
class DiffusionRankSettings:
    """What a diffusion rank needs to know before it loads."""

    checkpoint: Path
    stage: DiffusionStage
    tasks: frozenset[Task]
    """What will be asked: decides which partitions are loaded."""
    slab_folder: Path
    """The only folder in which landings may lie."""
    slab: Path
    """The service's own slab in it."""
    log_level: LogLevel
    log_format: LogFormat
    adapter: Adapter | None = None
    """Merged into the weights of its partition while they are read."""
    encode_precision: EncodePrecision = "fp32"
    """How the video VAE encodes, here or in the encoder: jobs report it."""


@dataclass(frozen=True)
class DiffusionFacts(RankFacts):
    """What a ready rank holds."""

    execution: Execution


@dataclass(frozen=True)
class MediaFiles:
    """The text-only split: what the ranks encode themselves, geometry and order from the request."""

    request: EncodeRequest
    files: tuple[Path, ...]
    """Inputs of the job, one a reference; they stay until the job ends."""


@dataclass(frozen=True)
class OutputTarget:
    """One clip of a job."""

    seed: int
    path: Path
    """Where the leader writes the MP4."""


@dataclass(frozen=True)
class Generate:
    """Make a job's clips, one after the other, from a payload that lies verified in its landing."""

    landing: ShmLanding
    manifest: Manifest
    task: Task
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    flow_shift: float
    audio_flow_shift: float
    outputs: tuple[OutputTarget, ...]
    media: MediaFiles | None = None
    """None: the payload holds all conditions."""
    adapter: Adapter | None = None
    """What the job's transformer gets on top of its weights. None: what it was loaded with."""
    step_cache: StepCache | None = None
    """None: every forward runs all blocks."""


@dataclass(frozen=True)
class PayloadTaken:
    """The leader has copied the payload: the landing can be given back."""


@dataclass(frozen=True)
class StepDone:
    """A DiT forward and its scheduler step are finished."""

    done: int
    of: int
    output: int
    """Of which clip; they are made in order."""
    seconds: float
    """Since the step before, or since denoising began."""
    skipped: bool = False
    """It ended after the first block, see `Generate.step_cache`."""


@dataclass(frozen=True)
class SoundDone:
    """The sound of a clip is decoded."""

    output: int = 0


@dataclass(frozen=True)
class ChunkDone:
    """A temporal chunk is decoded and on its way into the file."""

    done: int
    of: int
    output: int = 0


@dataclass(frozen=True)
class Muxing:
    """Everything of a clip is decoded; its file is finished beside what the ranks do next: with the last clip of a job,
    the next job."""

    output: int = 0


DiffusionEvent = PayloadTaken | StepDone | SoundDone | ChunkDone | Muxing


@dataclass(frozen=True)
class Generated:
    """Every MP4 is written whole, not yet in its place."""

    outputs: tuple[VideoOutput, ...]
    timings: dict[str, float]
    """Seconds by stage, of all outputs together."""
    warnings: tuple[str, ...]
    peak_memory_mb: float | None
