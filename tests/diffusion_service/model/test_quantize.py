"""FP8 products: their rounding, what they take and leave, their scales, and what they do to clips."""

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.nn.functional import cosine_similarity

from diffusion_service.model import quantize
from diffusion_service.model.adaln import Modulation
from diffusion_service.model.attention import attend_with, join_qkv, norm_and_rotate, use_attention
from diffusion_service.model.compile import compile_blocks
from diffusion_service.model.dit import Dit, Moment, Rows
from diffusion_service.model.quantize import FP8, Fp8Linear, Quantizer, check_device, check_scales, quantized
from diffusion_service.parallel.tensor import DIT_PLAN
from shared_runtime.ranks.comm import RankComm
from shared_runtime.ranks.mesh import Mesh
from shared_runtime.ranks.worker import TaskHandle
from shared_runtime.sharding import Sharding
from shared_runtime.tiny import tiny_checkpoint
from shared_runtime.weights import load_transformer, weight_bytes
from shared_schema.deploy.quantization import CONDITION, LINEARS, MODULATION
from shared_schema.errors import DeployError
from shared_schema.tasks import Task
from tests.diffusion_service.parallel.dit_forward import fitted as group_fitted
from tests.diffusion_service.parallel.dit_forward import inputs, step
from tests.diffusion_service.rank_jobs import Outcome, Shop, plan
from tests.ranks import Ranks

FP8_STAGE: dict[str, object] = {"quantization_config": {"transformer": {"method": "fp8"}}}
SHARDS = "tests.diffusion_service.model.test_quantize:shards"


def loaded(*ignored: str, dtype: torch.dtype = torch.float32) -> Any:
    quantizer = Quantizer(ignored)

    def place(name: str, weight: torch.Tensor) -> torch.Tensor:
        return quantizer.place(name, weight.to(dtype))

    transformer = load_transformer(tiny_checkpoint(), "transformer", "cpu", place=place)
    quantizer.fit(transformer)
    return transformer


def fp8_names(transformer: Any) -> set[str]:
    return {name for name, module in transformer.named_modules() if isinstance(module, Fp8Linear)}


def fitted(transformer: Any, *, join: bool = False) -> Dit:
    use_attention(transformer, attend_with("TORCH_SDPA"))
    dit = Dit(transformer, Modulation(transformer, on_host=False))
    if join:
        join_qkv(transformer, attend_with("TORCH_SDPA"), norm_and_rotate)
    return dit


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_emulation_rounds_as_torchs_own_fp8_product() -> None:
    random = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 64, generator=random).bfloat16() * 3 for n in (10, 48))
    (left, left_scale), (right, right_scale) = quantized(rows), quantized(weight)
    ours = quantize.product(left, left_scale, right, right_scale, torch.bfloat16)
    torchs = torch._scaled_mm(left, right.t(), left_scale, right_scale.t(), out_dtype=torch.bfloat16)
    assert torch.equal(ours, torchs)
    exact = rows.float() @ weight.float().t()
    assert 0.005 < ((ours.float() - exact).norm() / exact.norm()) < 0.05


def test_every_row_has_a_scale_that_reaches_its_largest_value() -> None:
    rows = torch.tensor([[1e-30, 0.0], [0.0, 0.0], [-3e5, 1.0], [5.0, 448.0]])
    values, scale = quantized(rows)
    assert bool((scale > 0).all())
    assert (values.float() * scale)[2:, 0].tolist() == pytest.approx([-3e5, 5.0], rel=0.04)
    assert values.dtype is FP8
    assert float(values.float().abs().max()) == 448


def test_attention_and_mlp_of_every_main_block_the_condition_and_nothing_else() -> None:
    plain, transformer = load_transformer(tiny_checkpoint(), "transformer", "cpu"), loaded()
    blocks = len(transformer.transformer_blocks)
    linears_of_blocks = {f"transformer_blocks.{n}.{each}" for n in range(blocks) for each in LINEARS}
    assert fp8_names(transformer) == {CONDITION, *linears_of_blocks}
    before, after = plain.state_dict(), transformer.state_dict()
    touched = {f"{name}.weight" for name in fp8_names(transformer)}
    assert all(torch.equal(before[name], after[name]) for name in before if name not in touched)
    linears = sum(before[name].numel() for name in touched)
    assert weight_bytes(plain) - weight_bytes(transformer) == 3 * linears - 4 * sum(
        len(before[name]) for name in touched
    )


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("to_out", {"attn.to_out.0"}),
        ("attn.to_k", {"attn.to_q", "attn.to_k", "attn.to_v"}),
        ("ff", {"ff.net.0.proj", "ff.net.2"}),
        ("ff.net.*.proj", {"ff.net.0.proj"}),
        (CONDITION, {CONDITION}),
    ],
)
def test_ignored_layers_are_left_alone(pattern: str, left: set[str]) -> None:
    names = fp8_names(loaded(pattern))
    assert {name.split(".", 2)[-1] for name in names} == {CONDITION, *LINEARS} - left
    assert step(fitted(loaded(pattern), join=True), inputs(5, loaded().config, torch.float32))[0].isfinite().all()


def test_one_block_can_be_ignored() -> None:
    left = fp8_names(loaded("transformer_blocks.0", CONDITION))
    assert {name.split(".")[1] for name in left} == {"1"}


def test_the_condition_is_projected_from_its_own_precision_and_near_full() -> None:
    given = inputs(6, loaded().config, torch.bfloat16)
    coarse, exact = (text_of(given, *ignored) for ignored in ((), (CONDITION,)))
    assert 0.001 < float((coarse - exact).norm() / exact.norm()) < 0.1


def text_of(given: dict[str, torch.Tensor], *ignored: str) -> torch.Tensor:
    """The text's rows of the packed sequence, projected and refined in BF16."""
    moment = Moment(given["timestep"], given["timestep_indices"])
    dit = fitted(loaded(*ignored, dtype=torch.bfloat16))
    denoising = dit.begin(given["encoder_hidden_states"], Rows.from_layout(given), [moment])
    return denoising._packed[0, given["text_indices"]].float()


@pytest.mark.parametrize("offload", ["enable_cpu_offload", "enable_layerwise_offload"])
def test_weights_that_wait_on_the_host_make_the_same_clip(shop: Shop, offload: str) -> None:
    only = frozenset({Task.T2VA})
    one, other = (shop.make({**FP8_STAGE, **more}, only=only) for more in ({}, {offload: True}))
    assert one.clips[Task.T2VA].digests == other.clips[Task.T2VA].digests
    assert one.facts.offloaded_bytes < other.facts.offloaded_bytes


@pytest.mark.parametrize("bad", [-3.4e38, float("nan"), 0.0])
def test_a_scale_that_is_none_stops_the_start(bad: float) -> None:
    # case 77
    transformer = loaded()
    check_scales(transformer)
    transformer.transformer_blocks[1].ff.net[2].scale[3] = bad
    with pytest.raises(DeployError, match=r"a scale of transformer_blocks\.1\.ff\.net\.2 is not finite and positive"):
        check_scales(transformer)


def test_damaged_weights_are_found_while_they_are_read() -> None:
    quantizer = Quantizer(())

    def place(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name == "transformer_blocks.0.attn.to_v.weight":
            weight = weight.clone()
            weight[2, 5] = float("inf")
        return quantizer.place(name, weight)

    transformer = load_transformer(tiny_checkpoint(), "transformer", "cpu", place=place)
    with pytest.raises(DeployError, match=r"transformer_blocks\.0\.attn\.to_v"):
        quantizer.fit(transformer)


def test_a_gpu_without_fp8_stops_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(DeployError, match=r"capability 8\.9 or later, not NVIDIA A100: leave it out"):
        check_device(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    check_device(cuda)
    with caplog.at_level(logging.WARNING):
        check_device(torch.device("cpu"))
    assert "emulated on a CPU" in caplog.text


def test_one_product_for_query_key_and_value_makes_the_same() -> None:
    given = inputs(6, loaded().config, torch.float32)
    apart, together = step(fitted(loaded()), given)[0], step(fitted(loaded(), join=True), given)[0]
    assert torch.allclose(apart, together, atol=1e-4)
    assert not torch.equal(apart, step(fitted(load_transformer(tiny_checkpoint(), "transformer", "cpu")), given)[0])


def test_blocks_with_fp8_compile_once_for_every_length() -> None:
    torch._dynamo.reset()
    transformer = loaded(dtype=torch.bfloat16)
    dit = fitted(transformer, join=True)
    compiled = CompileCounter()
    compile_blocks(transformer.transformer_blocks, backend=compiled)
    dit.warm_up(300)
    warm = compiled.frame_count
    assert warm == 1
    for rows in (4, 17):
        step(dit, inputs(rows, transformer.config, torch.bfloat16))
    assert compiled.frame_count == warm


def test_blocks_that_fp8_leaves_alone_are_compiled_before_a_request_too() -> None:
    torch._dynamo.reset()
    transformer = loaded("transformer_blocks.0.attn", dtype=torch.bfloat16)
    dit = fitted(transformer, join=True)
    compiled = CompileCounter()
    compile_blocks(transformer.transformer_blocks, backend=compiled)
    dit.warm_up(300)
    assert compiled.frame_count == 2
    for rows in (4, 17):
        step(dit, inputs(rows, transformer.config, torch.bfloat16))
    assert compiled.frame_count == 2


def shards(comm: RankComm, _task: TaskHandle) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The leader's FP8 weights and scales of the first block."""
    quantizer = Quantizer((), modulation=True)
    transformer = load_transformer(
        tiny_checkpoint(), "transformer", comm.device, Sharding(DIT_PLAN, comm), place=quantizer.place
    )
    quantizer.fit(transformer)
    block = transformer.transformer_blocks[0]
    named = [(name, module) for name, module in block.named_modules() if isinstance(module, Fp8Linear)]
    return {name: (module.weight.float(), module.scale.data) for name, module in named}


def as_gpus_run_it(comm: RankComm, _task: TaskHandle) -> tuple[float, int]:
    """The largest difference between eager and compiled blocks at two lengths, and how many graphs that took."""
    quantizer = Quantizer(())
    sharding = Sharding(DIT_PLAN, comm)
    transformer = load_transformer(tiny_checkpoint(), "transformer", comm.device, sharding, place=quantizer.place)
    quantizer.fit(transformer)
    dit, attend = group_fitted(transformer, comm)
    join_qkv(transformer, attend, norm_and_rotate)

    def made() -> list[torch.Tensor]:
        return [step(dit, inputs(rows, transformer.config, torch.float32))[0] for rows in (4, 7)]

    eager = made()
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(transformer.transformer_blocks, backend="aot_eager")
    dit.warm_up(100)
    apart = max(float((one - other).abs().max()) for one, other in zip(eager, made(), strict=True))
    return apart, counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_group_compiles_them_as_one_graph(ranks: Ranks) -> None:
    apart, graphs = ranks.run(Mesh(tp=2), "tests.diffusion_service.model.test_quantize:as_gpus_run_it")
    assert apart < 1e-4
    assert graphs == 1


def tables(comm: RankComm, _task: TaskHandle) -> tuple[torch.Tensor, torch.Tensor]:
    """The first block's AdaLN table, of FP8 projections and of plain ones."""
    made = []
    for ignored in ((), ("adaln_proj",)):
        quantizer = Quantizer(ignored, modulation=True)
        sharding = Sharding(DIT_PLAN, comm)
        transformer = load_transformer(tiny_checkpoint(), "transformer", comm.device, sharding, place=quantizer.place)
        quantizer.fit(transformer)
        assert any(name.endswith(MODULATION) for name in fp8_names(transformer)) is (not ignored)
        modulation = Modulation(transformer, on_host=False)
        times = torch.tensor([0.25, 0.999])
        embedded = torch.randn(2, transformer.config.time_embed_dim, generator=torch.Generator().manual_seed(1))
        made.append(modulation.tables([times], [embedded])[0][0])
    return made[0], made[1]


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"ulysses": 2}], ids=str)
def test_what_several_ranks_hold_of_adaln_is_quantized_too(ranks: Ranks, degrees: dict[str, int]) -> None:
    coarse, exact = ranks.run(Mesh(**degrees), "tests.diffusion_service.model.test_quantize:tables")
    assert coarse.shape == exact.shape
    assert 0.001 < float((coarse - exact).norm() / exact.norm()) < 0.05


def test_one_rank_that_has_adaln_on_the_host_leaves_it(shop: Shop) -> None:
    alone, both = (shop.make({**FP8_STAGE, **plan(*each)}, only=frozenset({Task.T2VA})) for each in ((1, 1), (1, 2)))
    config = load_transformer(tiny_checkpoint(), "transformer", "cpu").transformer_blocks
    adaln = sum(block.adaln_proj.linear.weight.numel() for block in config)
    assert alone.facts.weight_bytes - both.facts.weight_bytes > 2 * adaln


def test_every_rank_quantizes_its_own_part(ranks: Ranks) -> None:
    plain = load_transformer(tiny_checkpoint(), "transformer", "cpu").transformer_blocks[0]
    shards = ranks.run(Mesh(tp=2), SHARDS)
    assert shards.keys() == {*LINEARS, MODULATION}
    for name, (weight, scale) in shards.items():
        whole = plain.get_submodule(name)
        assert isinstance(whole, nn.Linear)
        rows, columns = weight.shape
        mine = whole.weight[:rows, :columns]
        if name == "ff.net.0.proj":
            mine = torch.cat([half[: rows // 2] for half in whole.weight.chunk(2)])
        wanted = quantized(mine)
        assert torch.equal(weight, wanted[0].float()), name
        assert torch.equal(scale, wanted[1]), name
        assert rows * columns * 2 == whole.weight.numel()


@pytest.fixture(scope="module")
def resident(shop: Shop) -> Outcome:
    return shop.make({}, steps=9)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_clips_of_every_task_stay_near_those_of_full_precision(
    shop: Shop, resident: Outcome, degrees: tuple[int, int]
) -> None:
    # case 77
    made = shop.make({**FP8_STAGE, **plan(*degrees)}, steps=9)
    assert made.facts.execution.precision.startswith("dit float32 with fp8 products, ")
    assert made.facts.weight_bytes < resident.facts.weight_bytes
    for task in Task:
        for name in ("video", "audio"):
            one, other = (getattr(each.clips[task], name).flatten() for each in (made, resident))
            assert other.isfinite().all()
            assert not torch.equal(one, other)
            assert float(cosine_similarity(one, other, dim=0)) > 0.98, (task, name)


@pytest.mark.parametrize(("ignored", "but"), [([], ""), (["to_out", "transformer_blocks.0"], " but in to_out, ")])
def test_a_job_says_which_products_are_fp8(shop: Shop, ignored: list[str], but: str) -> None:
    stage = {"quantization_config": {"transformer": {"method": "fp8", "ignored_layers": ignored}}}
    made = shop.make(stage, only=frozenset({Task.T2VA}))
    more = "".join(ignored[1:])
    assert (
        made.facts.execution.precision == f"dit float32 with fp8 products{but}{more}, vae encode fp32, vae decode fp32"
    )


def test_the_same_seed_makes_the_same_clip(shop: Shop) -> None:
    one, other = shop.make(FP8_STAGE), shop.make(FP8_STAGE)
    assert {task: clip.digests for task, clip in one.clips.items()} == {
        task: clip.digests for task, clip in other.clips.items()
    }


class NoStream:
    """A CUDA stream on a machine that has none: everything is done when it is asked for."""

    def __init__(self, *_: object) -> None: ...
    def wait_stream(self, _other: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def record_event(self) -> None: ...


@pytest.mark.parametrize("ignored", [0, 1])
def test_projections_on_the_host_may_differ_where_one_block_is_not_quantized(
    ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoStream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    made = []
    for on_host in (False, True):
        quantizer = Quantizer([f"transformer_blocks.{ignored}"], modulation=True)
        transformer = load_transformer(
            tiny_checkpoint(), "transformer", "cpu", place=lambda name, tensor, q=quantizer: q.place(name, tensor)
        )
        quantizer.fit(transformer)
        width = transformer.time_embedder.linear_2.out_features
        modulation = Modulation(transformer, on_host=on_host, device=torch.device("cpu"), pinned=False)
        embedded = [torch.randn(2, width, generator=torch.Generator().manual_seed(0))]
        made.append(modulation.tables([torch.tensor([0.5, 0.25])], embedded)[0])
    for here, there in zip(*made, strict=True):
        assert torch.equal(here, there)
