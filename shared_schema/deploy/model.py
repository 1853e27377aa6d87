"""Every key of a deploy file, declared once, with its default: what `show-config` prints. Pure.

The vocabulary is vLLM-Omni's, so that files which people have today load unchanged; `model:` and `service:` (in
`service.py`) are ours. What spans several keys is in `checks.py`, what this version cannot do yet in `served.py`.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from shared_schema.deploy.service import ServiceSettings
from shared_schema.deploy.values import CPU, Devices, Settings, only
from shared_schema.tasks import MAX_SIGMA_POINTS, MIN_SIGMA_POINTS

LoadFormat = Literal["safetensors", "dummy"]
Precision = Literal["fp16", "tf32", "fp32"]
EncodePrecision = Literal["fp32", "split", "tf32"]
AttentionBackend = Literal["FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA"]
ConnectorName = Literal["SharedMemoryConnector", "NixlConnector"]
Shift = Annotated[float, Field(gt=0, le=100)]
Degree = Annotated[int, Field(ge=1)]
One = Annotated[int, only(1, "this kind of parallelism is not served")]


class SharedMemoryConnector(Settings):
    """The payload crosses in one memcpy, on one host."""

    name: Literal["SharedMemoryConnector"]
    extra: dict[str, object] = Field(default={}, max_length=0)


class NixlExtra(Settings):
    """Options of vLLM-Omni 0.30's NIXL connector, and `gpu_direct`."""

    host: str = "auto"
    zmq_port: int | None = None
    backends: tuple[str, ...] = ("UCX",)
    role: str | None = None
    stage_id: int | None = None
    agent_name: str | None = None
    num_threads: PositiveInt | None = None
    sender_host: str | None = None
    sender_zmq_port: int | None = None
    receive_device: str | None = None
    memory_type: str | None = None
    lease_seconds: PositiveFloat | None = None
    transfer_timeout_s: PositiveFloat | None = None
    poll_interval_s: PositiveFloat | None = None
    handshake_timeout_ms: PositiveInt | None = None
    handshake_max_wait_s: PositiveFloat | None = None
    handshake_retry_s: PositiveFloat | None = None
    metadata_query_timeout_ms: PositiveInt | None = None
    gpu_direct: bool = False
    """NIXL reads payloads in the encoder's GPU memory; UCX must have CUDA. For GPUDirect RDMA: without such a card it
    took six times as long as by way of host memory."""


class NixlConnector(Settings):
    """The payload crosses by NIXL; no other way is tried when it cannot."""

    name: Literal["NixlConnector"]
    extra: NixlExtra = NixlExtra()


Connector = Annotated[SharedMemoryConnector | NixlConnector, Field(discriminator="name")]


class TextEncoderRole(Settings):
    """How the rank group runs the text encoder."""

    parallel_mode: Literal["tp"]


class VideoVaeRole(Settings):
    """How the rank group runs the video VAE encoder: tiles and temporal clips spread, or the leader alone."""

    parallel_mode: Literal["patch", "leader"]


class AudioVaeRole(Settings):
    """How the rank group runs the audio VAE encoder."""

    parallel_mode: Literal["leader"]


class EncoderComponents(Settings):
    """The three roles of the encoder group; in the text-only split `text_encoder` alone."""

    text_encoder: TextEncoderRole | None = None
    video_vae: VideoVaeRole | None = None
    audio_vae: AudioVaeRole | None = None


class HfOverrides(Settings):
    """Where vLLM-Omni keeps the roles."""

    minimax_h3_encoder_components: EncoderComponents | None = None


class Stage(Settings):
    """What both stages have: where a rank group runs and what it loads."""

    stage_id: int
    devices: Devices = Field(min_length=1)
    """One device a rank: indices into CUDA_VISIBLE_DEVICES, or `cpu` repeated."""
    share_devices: bool = False
    """Both stages must say so before their devices may overlap."""
    max_num_seqs: Annotated[int, only(1, "more than one request at a time is not served yet")] = 1
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Accepted, as vLLM-Omni's files have it; nothing is limited by it."""
    load_format: LoadFormat = "safetensors"
    """dummy: weights are made up in the configuration's shapes, and no file of weights needs to be there."""
    enforce_eager: bool = False
    vae_encode_precision: EncodePrecision | None = None
    """Compute of the video VAE encoder; its weights stay FP32, and the audio VAE is FP32. split: on tensor cores, an
    operand in two TF32 pieces where `ways.json` found that faster than FP32; tf32: in one, which is far less exact.
    None: split on a GPU, fp32 on the CPU.
    """

    @property
    def dummy(self) -> bool:
        """Whether weights are made up."""
        return self.load_format == "dummy"

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks need no GPU."""
        return self.devices[0] == CPU

    @property
    def encode_precision(self) -> EncodePrecision:
        """`vae_encode_precision` with nothing left open."""
        return self.vae_encode_precision or ("fp32" if self.on_cpu else "split")


class EncoderSampling(Settings):
    """vLLM-Omni's dummy sampling of the encoder stage."""

    max_tokens: Annotated[int, only(1, "the encoder makes no tokens")] = 1
    temperature: Annotated[float, only(0.0, "the encoder makes no tokens")] = 0.0
    detokenize: Annotated[bool, only(False, "the encoder makes no tokens")] = False


class EncoderStage(Stage):
    """Stage 0: the text encoder and the two VAE encoders, as one tensor-parallel group."""

    stage_id: Literal[0]
    tensor_parallel_size: Degree = 1
    output_connectors: dict[Literal["to_stage_1"], str] = Field(default={})
    hf_overrides: HfOverrides = HfOverrides()
    default_sampling_params: EncoderSampling = EncoderSampling()

    @property
    def components(self) -> EncoderComponents | None:
        """The roles that the file names."""
        return self.hf_overrides.minimax_h3_encoder_components

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.tensor_parallel_size


class ModelLoaded(Settings):
    """Which parts stage 1 has itself."""

    text_encoder: Annotated[bool, only(False, "the encoder service owns it")]
    vae_encoder: bool = True
    """False: the full split. True: the text-only split, in which the diffusion group encodes the media."""
    transformer: Annotated[bool, only(True, "stage 1 is the transformer")] = True
    vae: Annotated[bool, only(True, "stage 1 decodes")] = True


class ParallelConfig(Settings):
    """How stage 1 spreads one request over its ranks."""

    tensor_parallel_size: Degree = 1
    ulysses_degree: Degree = 1
    vae_patch_parallel_size: Degree = 1
    vae_parallel_mode: Literal["tile"] = "tile"
    ring_degree: One = 1
    cfg_parallel_size: One = 1
    pipeline_parallel_size: One = 1
    data_parallel_size: One = 1
    allgather_degree: One = 1


class ExtraArgs(Settings):
    """Sampling defaults of this model alone. None: the scheduler's own."""

    flow_shift: Shift | None = None
    audio_flow_shift: Shift | None = None


class SamplingDefaults(Settings):
    """What a request gets that does not say."""

    seed: int = Field(default=-1, ge=-1, lt=2**63)
    """-1 draws one for every job."""
    num_inference_steps: int = Field(default=50, ge=MIN_SIGMA_POINTS, le=MAX_SIGMA_POINTS)
    """Sigma points; forwards are one fewer."""
    extra_args: ExtraArgs = ExtraArgs()

    @property
    def flow_shift(self) -> float | None:
        """None: the video scheduler's own."""
        return self.extra_args.flow_shift

    @property
    def audio_flow_shift(self) -> float | None:
        """None: the audio scheduler's own."""
        return self.extra_args.audio_flow_shift


class TransformerQuantization(Settings):
    """Online quantization of the transformer's linears."""

    method: Literal["fp8"]
    """Attention and MLP products of the main blocks and the condition projection, on several ranks AdaLN's too, with a
    scale for every row."""
    ignored_layers: tuple[str, ...] = ()
    """Parts of names that stay as they are, such as `to_out`, `context_embedder` (the condition projection) or
    `transformer_blocks.0`; `*` stands for anything. Query,
    key and value go together."""


class Quantization(Settings):
    """What of stage 1 is quantized: the transformer, or nothing."""

    transformer: TransformerQuantization


class LayerOffload(Settings):
    """Layer-mode options of the transformer."""

    weight_transfer: Literal["allgather", "rank-local"] | None = None
    """Of distributed layerwise offload. None: plain layerwise, or rank-local where blocks are resident."""
    resident_layers: int = Field(default=0, ge=0)


class LayerOptions(Settings):
    """Layer-mode options by component."""

    dit: LayerOffload = LayerOffload()


class Offload(Settings):
    """vLLM-Omni's compact form of the offload keys."""

    mode: Literal["module", "layer"]
    components: tuple[Literal["dit"], ...] = Field(min_length=1, max_length=1)
    layer_options: LayerOptions = LayerOptions()
    pin_memory: bool = True


class X264(Settings):
    """How the MP4's picture is encoded while the next frames are decoded."""

    preset: Literal["ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow"] = "veryfast"
    """veryfast keeps up with a decoder that makes 124 frames in 3.8 s: 1.0 s for them on 16 cores, medium takes 3.0 s
    and has 40 frames still to do when the last one comes."""
    crf: int = Field(default=17, ge=0, le=51)
    """Quality: lower is better and larger."""
    threads: int = Field(default=8, ge=1, le=64)
    """Other numbers make other bytes of the same frames."""
    lookahead: int | None = Field(default=None, ge=0, le=60)
    """Frames that x264 looks at before it encodes one, and has still to do when the last one comes. None: the
    preset's."""
    sliced_threads: bool = False
    """Threads share each frame, in place of having one each that waits for the one before it."""


class DiffusionStage(Stage):
    """Stage 1: the transformer and the two VAE decoders."""

    stage_id: Literal[1]
    model_loaded: ModelLoaded
    parallel_config: ParallelConfig = ParallelConfig()
    input_connectors: dict[Literal["from_stage_0"], str] = Field(default={})
    stage_input_payload_keys: tuple[Literal["encoder_output"], ...] = Field(
        default=("encoder_output",), min_length=1, max_length=1
    )
    default_sampling_params: SamplingDefaults = SamplingDefaults()
    vae_use_tiling: Annotated[bool, only(True, "the decoder always works in tiles")] = True
    vae_decode_precision: Precision | None = None
    """Compute of the video VAE decoder; its weights stay FP32. None: fp16 on a GPU, fp32 on the CPU."""
    x264: X264 = X264()
    step_execution: Annotated[bool, only(False, "a request's steps run together")] = False
    diffusion_attention_backend: AttentionBackend | None = None
    """The transformer's attention: FlashAttention-3, cuDNN's, or torch's choice. None: the first of these that runs."""
    diffusion_quantization_config: Quantization | None = None
    diffusion_offload_config: Offload | None = None
    lora_path: str | None = None
    """The Turbo adapter of every request: its file, or the folder that holds it alone. `--lora-path` goes before it."""
    lora_scale: float = Field(default=1.0, allow_inf_nan=False)
    """What that adapter's effect is multiplied by."""
    enable_cpu_offload: bool = False
    enable_layerwise_offload: bool = False
    enable_distributed_layerwise_offload: bool = False
    dlo_use_allgather: bool = True
    dlo_resident_layers: int = Field(default=0, ge=0)

    @property
    def text_only(self) -> bool:
        """Whether the encoder service sends text alone and this stage encodes the media."""
        return self.model_loaded.vae_encoder

    @property
    def defaults(self) -> SamplingDefaults:
        """What a request gets that does not say."""
        return self.default_sampling_params

    @property
    def decode_precision(self) -> Precision:
        """`vae_decode_precision` with nothing left open."""
        return self.vae_decode_precision or ("fp32" if self.on_cpu else "fp16")

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.parallel_config.tensor_parallel_size * self.parallel_config.ulysses_degree


class ModelSettings(Settings):
    """Which weights, beyond `--model`."""

    revision: str | None = None
    """Branch, tag or commit on the hub. None: the hub's main branch."""


class Deployment(Settings):
    """A deploy file with nothing left open."""

    pipeline: Literal["minimax_h3_disaggregated"] = "minimax_h3_disaggregated"
    async_chunk: Annotated[bool, only(False, "a payload travels whole")] = False
    trust_remote_code: bool = False
    """Accepted; no remote code is ever run."""
    distributed_executor_backend: Literal["mp", "ray"] = "mp"
    """mp: all ranks on this host. ray: the leader on this host, the others anywhere in a Ray cluster; Ray chooses the
    GPUs, and `devices` only says how many ranks there are and whether they need one."""
    connectors: dict[str, Connector] = Field(default={})
    stages: tuple[EncoderStage, DiffusionStage]
    model: ModelSettings = ModelSettings()
    service: ServiceSettings = ServiceSettings()

    @property
    def encoder(self) -> EncoderStage:
        """Stage 0."""
        return self.stages[0]

    @property
    def diffusion(self) -> DiffusionStage:
        """Stage 1."""
        return self.stages[1]

    @property
    def connector(self) -> ConnectorName:
        """What the payload travels through; an edge that names nothing is shared memory."""
        named = self.diffusion.input_connectors.get("from_stage_0")
        return "SharedMemoryConnector" if named is None else self.connectors[named].name

    @property
    def nixl(self) -> NixlExtra | None:
        """Options of the edge's NIXL connector; None where the payload travels through shared memory."""
        named = self.diffusion.input_connectors.get("from_stage_0")
        connector = None if named is None else self.connectors[named]
        return connector.extra if isinstance(connector, NixlConnector) else None
