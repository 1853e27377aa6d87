"""Which module of the transformer a LoRA tensor is for, in every way that trainers name it. Pure.

transformer_blocks.0.attn.to_q.lora_A.weight         diffusers; with `transformer.` in front, as diffusers saves it
base_model.model.<module>.lora_A.default.weight      PEFT, with or without either addition
diffusion_model.blocks.0.attn.out_proj.lora_A.weight the original checkpoint's names, with or without the prefix
lora_unet_blocks_0_attn_out_proj.lora_down.weight    Kohya: every dot an underscore; alpha as a tensor beside it
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Role = Literal["down", "up", "alpha"]

_ROLES: dict[str, Role] = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_A.default.weight": "down",
    "lora_B.default.weight": "up",
    "lora_down.weight": "down",
    "lora_up.weight": "up",
    "lora.down.weight": "down",
    "lora.up.weight": "up",
    "alpha": "alpha",
}
_WRAPPER = "base_model.model."
_PREFIXES = ("diffusion_model.", "transformer.", "transformer_ref.")
_REF_PREFIX = "transformer_ref."
_KOHYA = "lora_unet_"
_FUSED = re.compile(r"(?:^|[._])(?:to_qkv|qkv_proj|qkv)$")

_ORIGINAL = (
    (r"transformer_blocks\.(\d+)\.", r"blocks.\1."),
    (r"token_refiner\.refiner_blocks\.", "token_refiner.blocks."),
    (r"attn\.to_out\.0$", "attn.out_proj"),
    (r"ff\.net\.0\.proj$", "mlp.fc1"),
    (r"ff\.net\.2$", "mlp.fc2"),
    (r"^proj_in$", "video_patch_proj"),
    (r"^audio_proj_in$", "audio_patch_proj"),
    (r"^context_embedder$", "condition_proj"),
    (r"^time_embedder\.linear_1$", "time_embedder.proj_in"),
    (r"^time_embedder\.linear_2$", "time_embedder.proj_out"),
    (r"^norm_out\.linear$", "final_layer.adaln_proj.linear"),
    (r"^proj_out$", "final_layer.video_out"),
    (r"^audio_proj_out$", "final_layer.audio_out"),
)
"""From diffusers' module names to those of the original checkpoint."""


@dataclass(frozen=True)
class Target:
    """A module of the transformer, by diffusers' name."""

    module: str
    swapped: bool = False
    """The file has the halves of the output the other way round: gate first, where diffusers' SwiGLU has it last."""


@dataclass(frozen=True)
class Key:
    """A tensor's name, taken apart."""

    module: str
    """As the file calls it, without prefixes."""
    role: Role
    for_ref: bool
    """Whether the file says that it belongs to the partition of references."""

    @property
    def fused(self) -> bool:
        """Whether query, key and value are one module: by heads or one after another, which no name tells."""
        return _FUSED.search(self.module) is not None


def read_key(name: str) -> Key | None:
    """What the name of a tensor says; None where it is none of LoRA's."""
    ending = next((ending for ending in _ROLES if name.endswith(f".{ending}")), None)
    if ending is None:
        return None
    module = name.removesuffix(f".{ending}").removeprefix(_WRAPPER)
    prefix = next((prefix for prefix in _PREFIXES if module.startswith(prefix)), "")
    return Key(module.removeprefix(prefix), _ROLES[ending], prefix == _REF_PREFIX)


def vocabulary(modules: Iterable[str]) -> dict[str, Target]:
    """Every name that one of `modules` (diffusers' names) may have in a file."""
    known: dict[str, Target] = {}
    for module in modules:
        original = module
        for pattern, name in _ORIGINAL:
            original = re.sub(pattern, name, original)
        names = {module: Target(module), original: Target(module, swapped=original.endswith("mlp.fc1"))}
        for name, target in names.items():
            known[name] = target
            known[_KOHYA + name.replace(".", "_")] = target
    return known
