"""What `import-linter` cannot say: what may be imported where, names, sizes, excepts, settings, state."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared_schema", "shared_runtime", "encoder_service", "diffusion_service", "video_client")
BASES = (ROOT, *(ROOT / package for package in PACKAGES))
TORCH = {"torch", "torchvision", "diffusers", "transformers", "accelerate"}

RANK_SIDE = (
    "shared_runtime.ranks.worker",
    "shared_runtime.ranks.comm",
    "shared_runtime.ranks.interfaces",
    "shared_runtime.ranks.parcels",
    "shared_runtime.sharding",
    "shared_runtime.conditioning",
    "shared_runtime.compiling",
    "shared_runtime.tensor_float",
    "shared_runtime.device_memory",
    "shared_runtime.weights",
    "shared_runtime.dummy",
    "encoder_service.outbox",
    "encoder_service.worker",
    "encoder_service.text",
    "encoder_service.looking",
    "encoder_service.vision",
    "encoder_service.pipeline",
    "encoder_service.parallel",
    "diffusion_service.worker",
    "diffusion_service.fitting",
    "diffusion_service.sampling",
    "diffusion_service.parallel",
    "diffusion_service.model",
)
"""Modules and packages that run in ranks alone. Everything else is control side."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "fastapi": ("encoder_service.app", "encoder_service.routes", "diffusion_service.app", "diffusion_service.api"),
    "starlette": (
        "shared_runtime.answers",
        "shared_runtime.errands",
        "shared_runtime.serving",
        "encoder_service.app",
        "encoder_service.token_gate",
        "encoder_service.routes",
        "diffusion_service.app",
        "diffusion_service.api",
    ),
    "uvicorn": ("shared_runtime.serving", "encoder_service.app", "diffusion_service.app"),
    "nixl": ("shared_runtime.transport.nixl",),
    "ray": ("shared_runtime.ranks.placer",),
    "av": ("shared_runtime.media", "diffusion_service.mux"),
    "httpx": ("diffusion_service.encoder_client", "diffusion_service.outbound", "video_client"),
    "httpx_sse": ("video_client",),
}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
BROAD_EXCEPTS = {
    "shared_runtime/ranks/worker.py",
    "diffusion_service/jobs/conduct.py",
    "diffusion_service/api/errors.py",
}
FILE_LINES, FUNCTION_LINES = 450, 60
"""Hard limits. Files should stay under 400, functions mostly under 15."""
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv")
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
    "WeakValueDictionary",
}


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages or PACKAGES for path in (ROOT / package).rglob("*.py"))


def all_sources() -> list[Path]:
    return sources(*PACKAGES, "tests", "benchmarks", "training")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def control_modules() -> list[str]:
    return [module for path in sources() if not within(module := module_of(path), RANK_SIDE)]


def test_control_side_reaches_torch_through_no_chain_of_imports() -> None:
    graph = import_graph()
    chains = [
        " -> ".join(chain)
        for foreign in sorted(TORCH & graph.modules)
        for module in control_modules()
        if (chain := graph.find_shortest_chain(importer=module, imported=foreign))
    ]
    assert not chains


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    circles = [
        " -> ".join((*chain, module))
        for module in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(module))
        if (chain := graph.find_shortest_chain(importer=imported, imported=module))
    ]
    assert not circles


def test_importing_the_whole_control_side_loads_no_torch() -> None:
    """Also what our own import graph cannot see: a foreign package that imports torch."""
    modules = [module for module in control_modules() if not module.endswith("__main__")]
    program = f"import sys, {', '.join(modules)}\nprint(sorted({TORCH} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


@pytest.mark.parametrize("package", list(ONLY_IN))
def test_foreign_packages_stay_where_they_belong(package: str) -> None:
    strays = [
        f"{name_of(path)}:{line}"
        for path in sources()
        for line, imported in imports(path)
        if within(imported, (package,)) and not within(module_of(path), ONLY_IN[package])
    ]
    assert not strays


def test_services_never_import_each_other() -> None:
    for own, other in (("encoder_service", "diffusion_service"), ("diffusion_service", "encoder_service")):
        assert not [
            name_of(path) for path in sources(own) for _, imported in imports(path) if within(imported, (other,))
        ]


def test_no_service_needs_what_is_beside_the_product() -> None:
    beside = ("training", "tests", "benchmarks")
    assert not [f"{name_of(path)}:{line}" for path in sources() for line, name in imports(path) if within(name, beside)]


def test_imports_inside_functions_are_only_the_late_one_of_each_cli() -> None:
    late = [
        name_of(path)
        for path in sources()
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert Counter(late) <= Counter(["encoder_service/cli.py", "diffusion_service/cli.py"])


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    assert not [name_of(path) for path in all_sources() if BANNED_NAMES & {path.stem, *path.relative_to(ROOT).parts}]


def test_files_are_small_enough_to_hold() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in all_sources()}
    assert not {name: lines for name, lines in lengths.items() if lines > FILE_LINES}


def test_functions_are_small_enough_to_hold() -> None:
    long = [
        f"{name_of(path)}:{node.lineno} {node.name} {lines}"
        for path in all_sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    ]
    assert not long


def test_every_module_with_code_says_what_it_is() -> None:
    assert not [name_of(path) for path in sources() if tree(path).body and not ast.get_docstring(tree(path))]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything and goes on. One that ends in a bare `raise` only tidies up."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in caught
    )


def test_broad_excepts_are_only_at_the_three_boundaries() -> None:
    broad = {
        name_of(path)
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    }
    assert broad <= BROAD_EXCEPTS


def test_errors_that_cross_a_boundary_are_all_in_the_file_of_their_tree() -> None:
    home = ROOT / "shared_schema" / "errors.py"
    family = {node.name for node in tree(home).body if isinstance(node, ast.ClassDef)} - {"ErrorDetail", "ErrorBody"}
    assert not [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in sources()
        if path != home
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and family & {ast.unparse(base) for base in node.bases}
    ]


def environment_reads(path: Path) -> Iterator[str]:
    """Uses of the environment but `os.environ[name] = value`: what a rank tells its libraries is no setting of ours."""
    nodes = list(ast.walk(tree(path)))
    written = {id(node.value) for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (alias.name for alias in node.names if "env" in alias.name)
        elif isinstance(node, ast.Attribute) and id(node) not in written and ast.unparse(node) in ENVIRONMENT:
            yield node.attr


def test_the_environment_is_read_only_in_cli() -> None:
    readers = {name_of(path) for path in sources() if any(environment_reads(path))}
    assert readers <= {"encoder_service/cli.py", "diffusion_service/cli.py"}


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in MUTABLE_CALLS
    return isinstance(value, MUTABLE)


def module_state(path: Path) -> Iterator[str]:
    """Module-level names that can change: `global` statements, lower-case names bound to something mutable."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Global):
            yield f"{name_of(path)}:{node.lineno} global {', '.join(node.names)}"
    for node in tree(path).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            constant = isinstance(target, ast.Name) and (
                target.id.lstrip("_").isupper() or re.match(r"__\w+__$", target.id)
            )
            if not constant and is_mutable(getattr(node, "value", None)):
                yield f"{name_of(path)}:{node.lineno} {ast.unparse(target)}"


def changed_constants(path: Path) -> Iterator[str]:
    """Constants that a function writes into: `TABLE[key] = value`, `TABLE.append(...)`."""
    writers = {"append", "add", "update", "setdefault", "pop", "clear", "extend", "remove", "discard", "insert"}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in writers:
            owner = node.func.value
        else:
            continue
        if isinstance(owner, ast.Name) and owner.id.lstrip("_").isupper() and len(owner.id) > 1:
            yield f"{name_of(path)}:{node.lineno} {owner.id}"


def test_no_module_keeps_state() -> None:
    assert not [note for path in sources() for note in (*module_state(path), *changed_constants(path))]


def declared_keys(path: Path) -> Iterator[tuple[str, str]]:
    """`(class, key)` of every annotated class attribute."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    yield node.name, entry.target.id


def defaults(path: Path) -> Iterator[tuple[int, str]]:
    """Names of parameters and class attributes that have a default other than None."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args]
            given = positional[len(positional) - len(node.args.defaults) :]
            pairs = [(argument.arg, value) for argument, value in zip(given, node.args.defaults, strict=True)]
            pairs += [(a.arg, value) for a, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        else:
            continue
        for name, value in pairs:
            if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
                yield node.lineno, name


def test_every_deploy_key_is_declared_once_and_its_default_never_repeated() -> None:
    models = [ROOT / "shared_schema" / "deploy" / name for name in ("model.py", "service.py")]
    declared = Counter(key for model in models for key in declared_keys(model))
    assert not [key for key, count in declared.items() if count > 1]
    keys = {key for owner, key in declared if owner in ("ServiceSettings", "SamplingDefaults", "DiffusionStage")}
    repeated = [
        f"{name_of(path)}:{line} {name}"
        for path in sources()
        if path not in models
        for line, name in defaults(path)
        if name in keys
    ]
    assert not repeated


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documents_name_files_that_are_there(document: str) -> None:
    named = re.findall(r"`([\w/]+\.py|[\w]+/[\w/]*)`", (ROOT / document).read_text(encoding="utf-8"))
    assert named
    assert not [
        name for name in named if not any((base / name).exists() for base in BASES) and name not in ("cli.py", "app.py")
    ]


def test_every_word_is_used_where_contributing_says_that_it_is_defined() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Words\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ,]+) \| .+ \| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    assert len(rows) == text.count("\n| ") - 1, "the head is no word"
    assert text.count("\n") <= 30
    for words, name in rows:
        source = next(path for base in BASES if (path := base / name).exists()).read_text(encoding="utf-8").lower()
        assert not [word for word in words.split(", ") if word not in source], name


def test_the_project_names_no_path_of_a_developers_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"/(?:home|Users|root|work)/[A-Za-z0-9_.-]+/")
    texts = [
        ROOT / name
        for name in listed.stdout.splitlines()
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".yaml", ""}
    ]
    assert not [
        name_of(path)
        for path in texts
        if path.is_file() and pattern.search(path.read_text(encoding="utf-8", errors="ignore"))
    ]
