"""What a service is started with: the command line with nothing left open, and the meaning of `--task-type`. Pure."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shared_schema.deploy.model import Deployment
from shared_schema.errors import DeployError
from shared_schema.lora import Contract
from shared_schema.tasks import Task

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
TaskType = Literal["auto", "combined", "t2va", "fl2va", "ref2va"]
Partition = Literal["transformer", "transformer_ref"]

BUILT_IN = ("tiny", "demo")
"""Models that are known by name: random weights, and a trained checkpoint of a little world."""
PARTITION_TASKS: dict[Partition, frozenset[Task]] = {
    "transformer": frozenset({Task.T2VA, Task.FL2VA}),
    "transformer_ref": frozenset({Task.REF2VA}),
}
"""What each folder of transformer weights can make."""


@dataclass(frozen=True)
class ServerSettings:
    """What both services are started with."""

    model: str
    """`tiny`, `demo`, a folder, or a hub id."""
    deployment: Deployment
    host: str
    port: int
    log_level: LogLevel
    log_format: LogFormat
    served_model_name: str | None
    """None: the hub id, or the folder's name."""
    advertise_url: str | None
    shared_token: str | None = field(repr=False)
    """From `service.internal_token` or its file; what the two services show each other."""


@dataclass(frozen=True)
class DiffusionSettings(ServerSettings):
    """What `h3-diffusion` is started with."""

    encoder_urls: tuple[str, ...]
    """Without a trailing slash; least busy first."""
    state_dir: Path
    database_url: str | None = field(repr=False)
    """Of the PostgreSQL database of the jobs. None: SQLite in the state folder."""
    task_type: TaskType
    lora_path: str | None


def partitions_for(task_type: TaskType, *, both_fit: bool, contract: Contract | None = None) -> tuple[Partition, ...]:
    """Which transformers to load. `auto` is both where both fit, else the one for t2va and fl2va.

    With an adapter, whose `contract` this is, only its own: every request gets the adapter, so no other is ever used.

    Raises:
        DeployError: the adapter is for other tasks.
    """
    if contract is not None:
        if task_type not in ("auto", "combined") and Task(task_type) not in contract.tasks:
            tasks = " and ".join(sorted(contract.tasks))
            what = f"{contract.artifact} is for {tasks}, and --task-type is {task_type}"
            raise DeployError(f"{what}: start with --task-type {min(contract.tasks)}")
        return tuple(partition for partition, tasks in PARTITION_TASKS.items() if contract.tasks <= tasks)
    match task_type:
        case "t2va" | "fl2va":
            return ("transformer",)
        case "ref2va":
            return ("transformer_ref",)
        case "combined":
            return ("transformer", "transformer_ref")
        case "auto":
            return ("transformer", "transformer_ref") if both_fit else ("transformer",)


def partition_of(task: Task) -> Partition:
    """The transformer that makes a task."""
    return next(partition for partition, tasks in PARTITION_TASKS.items() if task in tasks)


def tasks_served(partitions: tuple[Partition, ...]) -> frozenset[Task]:
    """What a service with these transformers can make; a request for another task is rejected."""
    return frozenset(task for partition in partitions for task in PARTITION_TASKS[partition])
