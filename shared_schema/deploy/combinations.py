"""Which ways to save memory go together, and with which plan: one table that the start-up check enforces. Pure.

`show-config --combinations` prints it, and the README has it.
"""

from dataclasses import dataclass
from typing import Literal

from shared_schema.deploy.model import Deployment, DiffusionStage
from shared_schema.deploy.offload import offload_of
from shared_schema.errors import DeployError

Axis = Literal["quantization", "offload", "lora", "compile", "plan", "task"]


@dataclass(frozen=True)
class Choice:
    """One value of an axis."""

    axis: Axis
    name: str
    """In the table."""
    setting: str
    """In messages."""


FP8 = Choice("quantization", "FP8", "fp8 quantization")
CPU_OFFLOAD = Choice("offload", "CPU offload", "enable_cpu_offload (mode: module)")
LAYERWISE = Choice("offload", "layerwise offload", "enable_layerwise_offload (mode: layer)")
GATHERED = Choice("offload", "distributed, gathered", "enable_distributed_layerwise_offload")
RANK_LOCAL = Choice(
    "offload", "distributed, rank-local", "enable_distributed_layerwise_offload with dlo_use_allgather: false"
)
START_UP = Choice("lora", "`--lora-path`", "--lora-path")
BY_REQUEST = Choice("lora", "`lora_roots`", "service.lora_roots")
COMPILED = Choice("compile", "compiled", "enforce_eager: false")
EAGER = Choice("compile", "eager", "enforce_eager: true")
ONE_RANK = Choice("plan", "one rank", "a single rank")
ULYSSES = Choice("plan", "Ulysses", "ulysses_degree over 1")
TENSOR = Choice("plan", "TP", "tensor_parallel_size over 1")
BOTH = Choice("plan", "TP x Ulysses", "tensor_parallel_size and ulysses_degree over 1")
TASKS = tuple(Choice("task", task, task) for task in ("t2va", "fl2va", "ref2va"))

CHOICES: tuple[Choice, ...] = (
    *(FP8, CPU_OFFLOAD, LAYERWISE, GATHERED, RANK_LOCAL),
    *(START_UP, BY_REQUEST, COMPILED, EAGER, ONE_RANK, ULYSSES, TENSOR, BOTH, *TASKS),
)
"""What the table has a row for. BF16, weights that stay on the GPU, and no adapter go with everything."""

_READ_ANEW = "its weights are read anew between jobs, which only works where they lie as they were stored: merge one"
_HELD = "leave one out"
_NOTHING_SHARED = "no two ranks hold the same weights, so there is nothing to gather: set dlo_use_allgather: false"

REFUSED: dict[frozenset[Choice], str] = {
    frozenset({FP8, BY_REQUEST}): _READ_ANEW,
    frozenset({GATHERED, BY_REQUEST}): _READ_ANEW,
    frozenset({RANK_LOCAL, BY_REQUEST}): _READ_ANEW,
    frozenset({CPU_OFFLOAD, START_UP}): _HELD,
    frozenset({CPU_OFFLOAD, BY_REQUEST}): _HELD,
    frozenset({LAYERWISE, START_UP}): _HELD,
    frozenset({LAYERWISE, BY_REQUEST}): _HELD,
    frozenset({GATHERED, ONE_RANK}): _NOTHING_SHARED,
    frozenset({GATHERED, TENSOR}): _NOTHING_SHARED,
}
"""Pairs that stop the start, and what to do about it; every other pair is served."""


def choices_of(deployment: Deployment, lora_path: str | None) -> tuple[Choice, ...]:
    """What a deployment chose on the axes that it decides; tasks are the request's."""
    stage = deployment.diffusion
    chosen = [*_quantization(stage), *_offload(stage)]
    chosen += [START_UP] * (lora_path is not None) + [BY_REQUEST] * bool(deployment.service.lora_roots)
    parallel = stage.parallel_config
    plans = {(False, False): ONE_RANK, (False, True): ULYSSES, (True, False): TENSOR, (True, True): BOTH}
    plan = plans[parallel.tensor_parallel_size > 1, parallel.ulysses_degree > 1]
    return (*chosen, EAGER if stage.enforce_eager else COMPILED, plan)


def _quantization(stage: DiffusionStage) -> list[Choice]:
    return [] if stage.diffusion_quantization_config is None else [FP8]


def _offload(stage: DiffusionStage) -> list[Choice]:
    plan = offload_of(stage)
    if plan.mode == "layer":
        return [GATHERED if plan.gathered else RANK_LOCAL if plan.distributed else LAYERWISE]
    return [CPU_OFFLOAD] if plan.mode == "module" else []


def check_combination(deployment: Deployment, lora_path: str | None) -> None:
    """Stop before anything starts if the deployment asks for two things that do not go together.

    Raises:
        DeployError: the first of them, and what to do.
    """
    chosen = choices_of(deployment, lora_path)
    for number, one in enumerate(chosen):
        for other in chosen[:number]:
            reason = refusal(one, other)
            if reason is not None:
                raise DeployError(f"{one.setting} does not go with {other.setting}: {reason}")


def refusal(one: Choice, other: Choice) -> str | None:
    """Why two choices of different axes stop the start; None where they are served together."""
    return REFUSED.get(frozenset({one, other}))


def table() -> str:
    """Every pair, as Markdown: `yes`, or the number of the reason below."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    columns = [choice for choice in CHOICES if choice.axis != "task"]
    lines = ["| | " + " | ".join(choice.name for choice in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in CHOICES:
        cells = [_cell(row, column, reasons) for column in columns]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    lines += ["", "Refused at start:", ""]
    return "\n".join([*lines, *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


def _cell(row: Choice, column: Choice, reasons: list[str]) -> str:
    if row.axis == column.axis:
        return ""
    reason = refusal(row, column)
    return "yes" if reason is None else str(reasons.index(reason) + 1)
