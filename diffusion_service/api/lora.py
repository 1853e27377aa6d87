"""What a request may say about adapters, and what its adapter's contract leaves open. Runs in the API process."""

import os.path
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from diffusion_service.adapters.adapter import Adapter
from diffusion_service.adapters.catalog import Catalog
from diffusion_service.api.limits import RequestDefaults, StartupAdapter
from diffusion_service.jobs.job import PlannedLora
from shared_schema.errors import AdapterError, InvalidRequest, NotServed
from shared_schema.lora import SUFFIX, Contract
from shared_schema.tasks import Task
from shared_schema.videos import LoraChoice

FIELD = "lora"
T = TypeVar("T")
Given = list[tuple[str, T]]
"""The spellings of one value that a request uses, by their full names."""


@dataclass(frozen=True)
class ChosenLora:
    """The adapter of a job, and what it was trained for, if anybody knows."""

    planned: PlannedLora
    contract: Contract | None


def choose_lora(
    choice: LoraChoice | None, task: Task, startup: StartupAdapter | None, catalog: Catalog | None
) -> ChosenLora | None:
    """The adapter of a job: the one that the server was started with, which a request may name and not change; else
    what the request names out of the allowed folders. Reads the file that is named.

    Raises:
        NotServed: the server has none, and no folder.
        InvalidRequest: another adapter or scale than the server's, or a file that cannot be used for the task.
    """
    if startup is not None:
        if choice is not None:
            _check_same(choice, startup)
        return ChosenLora(planned(startup.adapter), startup.contract)
    if choice is None:
        return None
    if catalog is None:
        raise NotServed("lora is not served: this server has neither an adapter nor service.lora_roots", param=FIELD)
    return _from_catalog(choice, task, catalog)


def _from_catalog(choice: LoraChoice, task: Task, catalog: Catalog) -> ChosenLora:
    name, path = _one(_names(choice)), _one(_paths(choice))
    if not (name or path):
        raise InvalidRequest("lora needs name or path", param=FIELD)
    scale = _one(_scales(choice))
    try:
        file, shown_as, contract = catalog.find(name=name, path=path)
        if contract is not None and task not in contract.tasks:
            tasks = " and ".join(sorted(contract.tasks))
            raise InvalidRequest(f"{contract.artifact} is for {tasks}, not {task}", param=FIELD)
        adapter = catalog.bind(file, task, name=shown_as, scale=1.0 if scale is None else scale)
    except AdapterError as error:
        raise InvalidRequest(error.message, param=FIELD, code=error.code) from error
    return ChosenLora(planned(adapter).model_copy(update={"file": str(file)}), contract)


def _one(given: Given[T]) -> T | None:
    """The value that all given spellings agree on; None where none is given."""
    for key, value in given[1:]:
        if value != given[0][1]:
            raise InvalidRequest(f"{given[0][0]} and {key} disagree", param=key)
    return given[0][1] if given else None


def planned(adapter: Adapter) -> PlannedLora:
    """An adapter as a job keeps it."""
    return PlannedLora(name=adapter.name, scale=adapter.scale, modules=len(adapter.modules))


def _check_same(choice: LoraChoice, startup: StartupAdapter) -> None:
    adapter = startup.adapter
    names, paths = _names(choice), _paths(choice)
    for key, name in names:
        if name not in (adapter.name, adapter.name.removesuffix(SUFFIX)):
            raise InvalidRequest(f"{key} is {name[:200]!a}, and {_only(adapter.name)}", param=key)
    for key, path in paths:
        if Path(os.path.abspath(path)) not in (adapter.file, adapter.file.parent):
            raise InvalidRequest(f"{key} is not where the adapter lies, and {_only(adapter.name)}", param=key)
    if not names and not paths:
        raise InvalidRequest("lora needs name or path", param=FIELD)
    for key, scale in _scales(choice):
        if scale != adapter.scale:
            raise InvalidRequest(f"{key} is {adapter.scale:g} on this server, not {scale:g}", param=key)


def _names(choice: LoraChoice) -> Given[str]:
    return _given(name=choice.name, lora_name=choice.lora_name, adapter=choice.adapter)


def _paths(choice: LoraChoice) -> Given[str]:
    return _given(path=choice.path, local_path=choice.local_path, lora_path=choice.lora_path)


def _scales(choice: LoraChoice) -> Given[float]:
    return _given(scale=choice.scale, lora_scale=choice.lora_scale)


def _given(**spellings: T | None) -> Given[T]:
    return [(f"{FIELD}.{key}", value) for key, value in spellings.items() if value is not None]


def _only(name: str) -> str:
    return f"every job of this server gets the adapter {name}"


def defaults_with(defaults: RequestDefaults, contract: Contract) -> tuple[RequestDefaults, list[str]]:
    """The defaults of a server with an adapter, and what that changes, for the log: old and new value."""
    kept = {name: getattr(contract, name) for name in ("num_inference_steps", "flow_shift", "audio_flow_shift")}
    changes = [
        f"{name} {getattr(defaults, name):g} becomes {value:g}"
        for name, value in kept.items()
        if getattr(defaults, name) != value
    ]
    return replace(defaults, **kept), changes


def shown(startup: StartupAdapter | None) -> dict[str, object] | None:
    """What `/v1/models` and `/v1/limits` say of the adapter of every job."""
    if startup is None:
        return None
    adapter, contract = startup.adapter, startup.contract
    return {
        "name": adapter.name,
        "scale": adapter.scale,
        "modules": len(adapter.modules),
        "tasks": sorted(contract.tasks),
        "num_inference_steps": contract.num_inference_steps,
        "flow_shift": contract.flow_shift,
        "audio_flow_shift": contract.audio_flow_shift,
    }


def check_contract(asked: Sequence[tuple[str, float | None]], contract: Contract) -> None:
    """Refuse what contradicts an adapter's contract.

    Args:
        asked: fields by their full names, None where a request does not say.
        contract: of the adapter that the job gets.

    Raises:
        InvalidRequest: a value that is not the contract's; `param` names it.
    """
    steps = contract.num_inference_steps
    for param, value in asked:
        if value is None:
            continue
        wanted = getattr(contract, param.rpartition(".")[2])
        if value == wanted:
            continue
        if param == "num_inference_steps" and value == contract.forwards:
            raise InvalidRequest(f"{param} counts sigma points: send {steps} or leave it out", param=param)
        what = f"{param} is {wanted:g} with the adapter {contract.artifact}, not {value:g}"
        raise InvalidRequest(f"{what}: leave it out", param=param)
