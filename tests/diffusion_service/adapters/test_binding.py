"""Every tensor of a LoRA file has one place in the transformer, whoever wrote it, or the file is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers
from safetensors.torch import load_file, save_file

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.binding import Shape, bind
from diffusion_service.adapters.finding import only_file
from diffusion_service.adapters.names import vocabulary
from diffusion_service.adapters.values import check_values
from shared_runtime.tiny import tiny_checkpoint
from shared_schema.errors import AdapterBroken, AdapterError, AdapterNotFound, AdapterNotServed, AdapterUnbound
from tests.adapters import Pairs, made_pairs, peft_config, shapes_of, write_adapter

Q, OUT, FC1 = (
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.1.attn.to_out.0",
    "transformer_blocks.0.ff.net.0.proj",
)
PEFT = ("lora_A.weight", "lora_B.weight")
KOHYA = ("lora_down.weight", "lora_up.weight")


@pytest.fixture(scope="module")
def shapes() -> dict[str, Shape]:
    return shapes_of(tiny_checkpoint())


def bound(file: Path, shapes: dict[str, Shape], alpha: float | None = None) -> Adapter:
    adapter = bind(file, "transformer", shapes, name="x", scale=1.0, alpha=alpha)
    check_values(adapter)
    return adapter


def some(shapes: dict[str, Shape], *modules: str, rank: int = 4) -> Pairs:
    return made_pairs({module: shapes[module] for module in modules}, rank=rank, dtype=torch.float32)


def original(module: str) -> str:
    names = {
        Q: "blocks.0.attn.to_q",
        OUT: "blocks.1.attn.out_proj",
        FC1: "blocks.0.mlp.fc1",
    }
    return names[module]


@pytest.mark.parametrize(
    ("named", "endings"),
    [
        (lambda module: module, PEFT),
        (lambda module: f"transformer.{module}", PEFT),
        (lambda module: module, ("lora_A.default.weight", "lora_B.default.weight")),
        (lambda module: f"base_model.model.{module}", PEFT),
        (lambda module: f"diffusion_model.{original(module)}", PEFT),
        (lambda module: f"base_model.model.diffusion_model.{original(module)}", PEFT),
        (original, PEFT),
        (lambda module: "lora_unet_" + original(module).replace(".", "_"), KOHYA),
        (lambda module: "lora_unet_" + module.replace(".", "_"), KOHYA),
        (lambda module: module, ("lora.down.weight", "lora.up.weight")),
    ],
)
def test_every_way_of_naming_binds_the_same(
    tmp_path: Path, shapes: dict[str, Shape], named: Callable[[str], str], endings: tuple[str, str]
) -> None:
    # case 75
    file = write_adapter(tmp_path / "a.safetensors", some(shapes, Q, OUT, FC1), named=named, endings=endings)
    adapter = bound(file, shapes)
    assert {each.module for each in adapter.modules} == {Q, OUT, FC1}
    assert {each.factor for each in adapter.modules} == {1.0}
    swapped = {each.module for each in adapter.modules if each.swapped}
    assert swapped == ({FC1} if "fc1" in named(FC1) else set())


def test_the_original_names_are_those_that_diffusers_converts(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    known = vocabulary(shapes)
    parts = ("blocks.", "token_refiner.blocks.", "final_layer.", "video_patch", "audio_patch", "condition", "time_emb")
    originals = [name for name, target in known.items() if name != target.module and name.startswith(parts)]
    # diffusers knows the fused form of query, key and value alone; and here the names outside the blocks are as many.
    convertible = [name for name in originals if not name.endswith(("to_q", "to_k", "to_v"))]
    assert len(convertible) == 2 * 4 + 1 * 3 + 8
    pairs = {name: made_pairs({name: shapes[known[name].module]}, dtype=torch.float32)[name] for name in convertible}
    file = write_adapter(tmp_path / "a.safetensors", pairs, endings=PEFT)
    expected = _convert_non_diffusers_minimax_h3_lora_to_diffusers(load_file(file))
    tensors = load_file(file)
    for each in bound(file, shapes).modules:
        up = tensors[each.up]
        up = torch.cat(up.chunk(2)[::-1]) if each.swapped else up
        assert torch.equal(up, expected[f"transformer.{each.module}.lora_B.weight"])
        assert torch.equal(tensors[each.down], expected[f"transformer.{each.module}.lora_A.weight"])
    assert len(expected) == 2 * len(convertible)


def test_a_file_that_names_a_module_twice_is_refused(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    again = {f"{original(OUT)}.lora_A.weight": torch.zeros(4, shapes[OUT][1])}
    file = write_adapter(tmp_path / "a.safetensors", some(shapes, OUT), endings=PEFT, others=again)
    with pytest.raises(AdapterUnbound, match=r"transformer_blocks.1.attn.to_out.0.lora_A.weight bind where another"):
        bound(file, shapes)


@pytest.mark.parametrize(
    ("broken", "kind", "says"),
    [
        ("nope.layer.lora_A.weight", AdapterUnbound, "nope.layer.lora_A.weight bind to nothing in transformer; 2 of 3"),
        (f"{Q}.dora_scale", AdapterUnbound, "dora_scale bind to nothing"),
        (f"{Q}.lora_A.weight", AdapterUnbound, f"{Q} have one matrix of the two"),
        ("transformer_ref.proj_in.lora_A.weight", AdapterUnbound, "is for transformer_ref, which makes ref2va alone"),
        ("blocks.0.attn.qkv_proj.lora_A.weight", AdapterNotServed, "is of a fused query, key and value"),
        ("lora_unet_blocks_0_attn_qkv_proj.lora_down.weight", AdapterNotServed, "is of a fused query, key and value"),
    ],
)
def test_one_wrong_tensor_refuses_the_file(
    tmp_path: Path, shapes: dict[str, Shape], broken: str, kind: type[AdapterError], says: str
) -> None:
    file = write_adapter(
        tmp_path / "a.safetensors", some(shapes, OUT), endings=PEFT, others={broken: torch.zeros(4, 64)}
    )
    with pytest.raises(kind, match=says.replace("[", r"\[")) as caught:
        bound(file, shapes)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_long_list_is_cut_and_counted(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    others = {f"nope.{number}.alpha": torch.zeros(1) for number in range(8)}
    file = write_adapter(tmp_path / "a.safetensors", some(shapes, OUT), endings=PEFT, others=others)
    with pytest.raises(AdapterUnbound, match=r"nope.4.alpha and 3 more bind to nothing .* 2 of 10 tensors"):
        bound(file, shapes)


@pytest.mark.parametrize("wrong", [torch.zeros(4, 63), torch.zeros(0, 64), torch.zeros(4, 64, 1), torch.zeros(64)])
def test_a_shape_that_does_not_fit_is_refused(tmp_path: Path, shapes: dict[str, Shape], wrong: torch.Tensor) -> None:
    for pair in ((wrong, torch.zeros(64, 4)), (torch.zeros(4, 64), wrong.T if wrong.ndim == 2 else wrong)):
        with pytest.raises(AdapterUnbound, match=r"takes \[64, r\] x \[r, 64\]"):
            bound(write_adapter(tmp_path / "a.safetensors", {OUT: pair}), shapes)


def test_other_dtypes_are_refused(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    down, up = some(shapes, OUT)[OUT]
    for dtype in (torch.float64, torch.float8_e4m3fn):
        file = write_adapter(tmp_path / "a.safetensors", {OUT: (down.to(dtype), up.to(dtype))})
        with pytest.raises(AdapterBroken, match=r"not F32 or F16 or BF16"):
            bound(file, shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_found(
    tmp_path: Path, shapes: dict[str, Shape], dtype: torch.dtype, value: float
) -> None:
    down, up = (matrix.to(dtype) for matrix in some(shapes, OUT)[OUT])
    bound(write_adapter(tmp_path / "a.safetensors", {OUT: (down, up)}), shapes)
    up[5, 2] = value
    with pytest.raises(AdapterBroken, match=rf"{OUT}.lora_B.default.weight has values that are not finite"):
        bound(write_adapter(tmp_path / "a.safetensors", {OUT: (down, up)}), shapes)


def alpha_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {f"{OUT}.alpha": torch.tensor(2.0, dtype=dtype)}


def test_alpha_comes_from_where_it_is_nearest(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    def factors(**given: object) -> dict[str, float]:
        file = write_adapter(tmp_path / "a.safetensors", some(shapes, OUT, Q), endings=PEFT, **given)  # type: ignore[arg-type]
        return {each.module: each.factor for each in bound(file, shapes, alpha=16.0).modules}

    assert factors() == {OUT: 4.0, Q: 4.0}, "the contract's over rank 4"
    for key in ("alpha", "lora_alpha", "ss_network_alpha"):
        assert factors(metadata={key: "8"}) == {OUT: 2.0, Q: 2.0}
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert factors(metadata={"alpha": "8"}, others=alpha_tensors(dtype)) == {OUT: 0.5, Q: 2.0}
    peft = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.alpha_pattern": {"attn.to_q": 1}}
    assert factors(metadata={"lora_adapter_metadata": json.dumps(peft)}) == {OUT: 2.0, Q: 0.25}
    file = write_adapter(tmp_path / "a.safetensors", some(shapes, OUT, rank=2), endings=PEFT)
    assert [each.factor for each in bound(file, shapes).modules] == [1.0], "alpha is the rank where nobody says"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_alpha_that_is_no_finite_number_is_refused(
    tmp_path: Path, shapes: dict[str, Shape], value: float, dtype: torch.dtype
) -> None:
    others = {f"{OUT}.alpha": torch.tensor(value, dtype=dtype)}
    file = write_adapter(tmp_path / "a.safetensors", some(shapes, OUT), endings=PEFT, others=others)
    with pytest.raises(AdapterBroken, match=rf"{OUT}.alpha is not a finite number"):
        bound(file, shapes)


def test_the_configuration_beside_a_peft_file_counts(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    file = write_adapter(tmp_path / "adapter_model.safetensors", some(shapes, OUT, Q), endings=PEFT)
    beside = tmp_path / "adapter_config.json"
    beside.write_text(peft_config(lora_alpha=8, alpha_pattern={"to_out.0": 2}))
    assert {each.module: each.factor for each in bound(file, shapes).modules} == {OUT: 0.5, Q: 2.0}
    for wrong, kind, says in (
        (peft_config(r=8), AdapterUnbound, "has rank 4, and the adapter's configuration says 8"),
        (peft_config(rank_pattern={"to_q": 2}), AdapterUnbound, "to_q has rank 4, .* says 2"),
        (peft_config(use_rslora=True), AdapterNotServed, "use_rslora"),
        (peft_config(use_dora=True), AdapterNotServed, "use_dora"),
        (peft_config(lora_alpha="NaN"), AdapterBroken, "lora_alpha is 'NaN'"),
        (peft_config(alpha_pattern={"(": 2}), AdapterBroken, "no pattern"),
        (peft_config(alpha_pattern=[]), None, ""),
        (peft_config(alpha_pattern=[1]), AdapterBroken, "are objects"),
        ("[", AdapterBroken, "no JSON"),
        ("[]", AdapterBroken, "no JSON object"),
    ):
        beside.write_text(wrong)
        if kind is None:
            bound(file, shapes)
            continue
        with pytest.raises(kind, match=says):
            bound(file, shapes)


def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    file = write_adapter(tmp_path / "a.safetensors", some(shapes, OUT), metadata={"alpha": "much"})
    with pytest.raises(AdapterBroken, match="alpha is 'much', not a finite number"):
        bound(file, shapes)
    two = {f"{OUT}.alpha": torch.zeros(2)}
    with pytest.raises(AdapterBroken, match="alpha is not one number"):
        bound(write_adapter(tmp_path / "a.safetensors", some(shapes, OUT), others=two), shapes)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        (
            "lora_nomatch",
            AdapterUnbound,
            r"nope.layer.lora_A.weight, nope.layer.lora_B.weight bind to nothing .*; 0 of 2",
        ),
        (
            "lora_partial",
            AdapterUnbound,
            r"nope.layer.lora_A.weight, nope.layer.lora_B.weight bind to nothing .*; 2 of 4",
        ),
        ("lora_nan", AdapterBroken, r"lora_A.weight has values that are not finite"),
        ("lora_empty", AdapterNotFound, r"lora_empty holds no .safetensors file"),
        ("lora_trunc.safetensors", AdapterBroken, r"lora_trunc.safetensors is not a whole safetensors file"),
        ("nothing", AdapterNotFound, r"nothing is not there"),
        ("img_quad.png", AdapterNotFound, r"img_quad.png is not a .safetensors file"),
    ],
)
def test_wrong_fixtures_have_their_error(
    cases: Path, shapes: dict[str, Shape], name: str, kind: type[AdapterError], says: str
) -> None:
    # cases 73 and 75
    with pytest.raises(kind, match=says):
        bound(only_file(cases / name), shapes)


def test_good_fixtures_bind_alike(cases: Path, shapes: dict[str, Shape]) -> None:
    # case 75
    made = [bound(only_file(cases / name), shapes) for name in ("lora_ok", "lora_kohya", "lora_prefixed")]
    places = [[(each.module, each.factor, each.swapped) for each in adapter.modules] for adapter in made]
    assert places[0] == places[1] == places[2]
    assert [module for module, *_ in places[0]] == [f"transformer_blocks.{n}.attn.to_out.0" for n in range(2)]


def test_a_file_without_tensors_is_refused(tmp_path: Path, shapes: dict[str, Shape]) -> None:
    save_file({}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterBroken, match="holds no tensor"):
        bound(tmp_path / "a.safetensors", shapes)
