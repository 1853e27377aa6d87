"""Raw YAML or JSON -> layers that merge: stages by id, one spelling for every key. Pure.

`platforms` becomes a layer of its own from its cuda part; the parts for other hardware are not read.
"""

import json

from shared_schema.deploy.merge import Layer, Path, Tree, dotted
from shared_schema.deploy.model import ParallelConfig
from shared_schema.errors import DeployError

STAGE_IDS = (0, 1)
SPELLINGS = {
    "quantization_config": "diffusion_quantization_config",
    "attention_backend": "diffusion_attention_backend",
}
PARALLEL = frozenset(ParallelConfig.model_fields)
"""Keys of stage 1 that may also stand beside `parallel_config`."""


def wrong(source: str, path: Path, message: str) -> DeployError:
    """The one line that names source, key and what to change."""
    where = f"{source}: {dotted(path)}" if path else source
    return DeployError(f"{where}: {message}", param=dotted(path) or None)


def file_layers(source: str, raw: object) -> tuple[Layer, Layer]:
    """What one file says, and what its `platforms.cuda` says.

    Raises:
        DeployError: not a mapping, or stages that are not a list of mappings with distinct known ids.
    """
    tree = _mapping(source, (), raw)
    platforms = _mapping(source, ("platforms",), tree.pop("platforms", None) or {})
    cuda_path: Path = ("platforms", "cuda")
    cuda = _mapping(source, cuda_path, platforms.get("cuda") or {})
    for key in cuda:
        if key != "stages":
            raise wrong(source, (*cuda_path, key), "unknown key: a platform has `stages`")
    over: Tree = {"stages": _stages(source, (*cuda_path, "stages"), cuda["stages"])} if "stages" in cuda else {}
    if "stages" in tree:
        tree["stages"] = _stages(source, ("stages",), tree["stages"])
    return Layer(source, tree), Layer(f"{source} (platforms.cuda)", over)


def override_layer(source: str, text: str) -> Layer:
    """`--stage-overrides`: a JSON object from stage id to keys of that stage.

    Raises:
        DeployError: not such an object, or an unknown stage.
    """
    raw = _mapping(source, (), _json(source, (), text))
    stages: Tree = {}
    for key, value in raw.items():
        stage_id = _stage_id(source, (key,), int(str(key)) if str(key).isdecimal() else key)
        stages[stage_id] = _stage(source, ("stages", stage_id), value, stage_id)
    return Layer(source, {"stages": stages})


def _mapping(source: str, path: Path, raw: object) -> Tree:
    if not isinstance(raw, dict):
        raise wrong(source, path, f"must be a mapping, not {raw!r}")
    for key, value in raw.items():
        if not isinstance(key, str):
            raise wrong(source, path, f"keys are text, not {key!r}")
        if isinstance(value, dict):
            _mapping(source, (*path, key), value)
    return dict(raw)


def _stages(source: str, path: Path, raw: object) -> Tree:
    if not isinstance(raw, list):
        raise wrong(source, path, "must be a list of stages")
    stages: Tree = {}
    for position, entry in enumerate(raw):
        stage = _mapping(source, (*path, position), entry)
        stage_id = _stage_id(source, (*path, position, "stage_id"), stage.get("stage_id"))
        if stage_id in stages:
            raise wrong(source, path, f"stage {stage_id} is listed twice")
        stages[stage_id] = _stage(source, (*path, stage_id), stage, stage_id)
    return stages


def _stage_id(source: str, path: Path, given: object) -> int:
    if isinstance(given, bool) or given not in STAGE_IDS or not isinstance(given, int):
        raise wrong(source, path, f"unknown stage {given!r}: stages are 0 (encoder) and 1 (diffusion)")
    return given


def _stage(source: str, path: Path, raw: object, stage_id: int) -> Tree:
    stage = _mapping(source, path, raw)
    if stage_id == 0:
        return stage
    for key, name in SPELLINGS.items():
        if key in stage:
            if name in stage:
                raise wrong(source, (*path, key), f"is another name of `{name}`: give one of them")
            stage[name] = stage.pop(key)
    quantization = stage.get("diffusion_quantization_config")
    if isinstance(quantization, str):
        where = (*path, "diffusion_quantization_config")
        stage["diffusion_quantization_config"] = _mapping(source, where, _json(source, where, quantization))
    return _fold_parallel(source, path, stage)


def _fold_parallel(source: str, path: Path, stage: Tree) -> Tree:
    flat = {key: value for key, value in stage.items() if key in PARALLEL}
    if not flat:
        return stage
    nested = _mapping(source, (*path, "parallel_config"), stage.get("parallel_config", {}))
    for key, value in flat.items():
        if nested.get(key, value) != value:
            raise wrong(source, (*path, key), f"is {value!r} here and {nested[key]!r} in parallel_config")
    rest = {key: value for key, value in stage.items() if key not in flat}
    rest["parallel_config"] = nested | flat
    return rest


def _json(source: str, path: Path, text: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise wrong(source, path, f"names `{name}` twice")
        return dict(pairs)

    try:
        raw: object = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise wrong(source, path, f"is not JSON: {error}") from None
    return raw
