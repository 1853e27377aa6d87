"""The published Turbo adapters, by the names of their files: what each is for and how it must be sampled. Pure."""

from dataclasses import dataclass

from shared_schema.errors import AdapterNotServed
from shared_schema.tasks import Task

SUFFIX = ".safetensors"
FUSED_EXPORT = "_comfyui"
"""In the name of a file whose query, key and value are one module."""
TURBO_AUDIO_SHIFT = 3.0
FL2V_TASKS = frozenset({Task.T2VA, Task.FL2VA})
REF2V_TASKS = frozenset({Task.REF2VA})


@dataclass(frozen=True)
class Contract:
    """What an adapter was trained for. A request for anything else is refused."""

    artifact: str
    """Name of its file."""
    tasks: frozenset[Task]
    num_inference_steps: int
    """Sigma points: one more than DiT forwards."""
    flow_shift: float
    alpha: float
    """Where the file itself declares none."""
    audio_flow_shift: float = TURBO_AUDIO_SHIFT

    @property
    def forwards(self) -> int:
        """DiT evaluations, which is what the artifact's name counts."""
        return self.num_inference_steps - 1


_PREFIX = "minimax_h3_"
CONTRACTS: dict[str, Contract] = {
    contract.artifact: contract
    for contract in (
        Contract(f"{_PREFIX}fl2v_turbo_4step_v0.1{SUFFIX}", FL2V_TASKS, 5, 12.0, 8.0),
        Contract(f"{_PREFIX}fl2v_turbo_4step_v1.0_768p_bf16{SUFFIX}", FL2V_TASKS, 5, 6.0, 128.0),
        Contract(f"{_PREFIX}fl2v_turbo_4step_v1.1_768p_bf16{SUFFIX}", FL2V_TASKS, 5, 6.0, 128.0),
        Contract(f"{_PREFIX}fl2v_turbo_4step_v1.2_768p_bf16{SUFFIX}", FL2V_TASKS, 5, 6.0, 8.0),
        Contract(f"{_PREFIX}fl2v_turbo_8step_v1.0_bf16{SUFFIX}", FL2V_TASKS, 9, 12.0, 8.0),
        Contract(f"{_PREFIX}fl2v_turbo_8step_v1.0_768p_bf16{SUFFIX}", FL2V_TASKS, 9, 6.0, 8.0),
        Contract(f"{_PREFIX}ref2v_turbo_4step_v0.1_bf16{SUFFIX}", REF2V_TASKS, 5, 12.0, 8.0),
        Contract(f"{_PREFIX}ref2v_turbo_8step_v1.0_768p_bf16{SUFFIX}", REF2V_TASKS, 9, 6.0, 8.0),
    )
}
"""By file name. Files of one schedule differ in alpha alone, so a renamed file would be served wrong without a sign."""


def check_export(name: str) -> None:
    """Refuse by its name what is an export for ComfyUI.

    Raises:
        AdapterNotServed: it is one.
    """
    if FUSED_EXPORT in name:
        plain = name.replace(FUSED_EXPORT, "")
        known = f": take {plain}" if plain in CONTRACTS else ""
        raise AdapterNotServed(f"{name} is an export for ComfyUI, with query, key and value fused{known}")


def contract_of(name: str) -> Contract:
    """The contract of a Turbo artifact.

    Raises:
        AdapterNotServed: an export for ComfyUI, or no published name: the name is what tells the schedule.
    """
    check_export(name)
    if name not in CONTRACTS:
        known = ", ".join(CONTRACTS)
        raise AdapterNotServed(f"{name} is not the name of a Turbo adapter; give it back its own, one of {known}")
    return CONTRACTS[name]
