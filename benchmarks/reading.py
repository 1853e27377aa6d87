"""How hard this code is to read, in figures, beside those of the projects that we learn from.

    python -m benchmarks.reading [--json FILE]        the table; fails where a row of ours is worse than every model's
    python -m benchmarks.reading --write              puts the table into CONTRIBUTING.md
    python -m benchmarks.reading --models-only        without SGLang, whose column decides nothing: needs no network

The models are measured as they are installed here. The serving layer of SGLang is read from its wheel, which is
downloaded, unpacked and never run (`--wheel FILE` uses one that is there).
"""

import argparse
import ast
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import provenance, write_json

ROOT = Path(__file__).parent.parent
OURS = ("shared_schema", "shared_runtime", "encoder_service", "diffusion_service", "video_client")
MODELS = ("starlette", "uvicorn", "httpx")
PEER = "sglang==0.5.23"
PEER_FOLDERS = (
    "sglang/srt/entrypoints",
    "sglang/srt/managers",
    "sglang/multimodal_gen/runtime/entrypoints",
    "sglang/multimodal_gen/runtime/managers",
    "sglang/multimodal_gen/runtime/server_args",
)
BROAD = {"Exception", "BaseException"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
BEGIN, END = "<!-- reading: begin -->", "<!-- reading: end -->"
ROWS = {
    "longest_file": "Longest file, lines",
    "median_file": "Median file",
    "longest_function": "Longest function",
    "p90_function": "90th percentile of functions",
    "import_cycles": "Import cycles",
    "typed_functions": "Functions with every type given, %",
    "broad_excepts_per_10k_lines": "Broad `except` in 10,000 lines",
    "getattr_with_default_per_10k_lines": "`getattr` with a default in 10,000 lines",
    "widest_config": "Fields of the widest configuration class",
    "tests_to_source": "Lines of tests to lines of source",
}
MORE_IS_BETTER = {"typed_functions", "tests_to_source"}


@dataclass(frozen=True)
class Figures:
    """What one body of code measures. Lengths in lines, shares in percent."""

    files: int
    longest_file: int
    median_file: int
    longest_function: int
    p90_function: int
    import_cycles: int
    typed_functions: int
    broad_excepts_per_10k_lines: float
    getattr_with_default_per_10k_lines: float
    widest_config: int
    tests_to_source: float | None


def measure(modules: Mapping[str, Path], tests: Iterable[Path] = ()) -> Figures:
    """The figures of these files, by module name."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = [len(text.splitlines()) for text in texts.values()]
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTION)]
    lengths = sorted(_length(function) for function in functions)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    per_10k = 10_000 / sum(lines)
    return Figures(
        files=len(lines),
        longest_file=max(lines),
        median_file=round(statistics.median(lines)),
        longest_function=lengths[-1],
        p90_function=lengths[len(lengths) * 9 // 10],
        import_cycles=cycles(trees),
        typed_functions=round(100 * sum(map(_typed, functions)) / len(functions)),
        broad_excepts_per_10k_lines=round(per_10k * sum(map(_broad, nodes)), 1),
        getattr_with_default_per_10k_lines=round(per_10k * sum(map(_guesses, nodes)), 1),
        widest_config=max((_fields(node) for node in nodes if isinstance(node, ast.ClassDef)), default=0),
        tests_to_source=_ratio(tests, sum(lines)),
    )


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _typed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    return function.returns is not None and all(argument.annotation is not None for argument in named)


def _broad(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in caught)


def _guesses(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) == 3
    )


def _fields(node: ast.ClassDef) -> int:
    """Settings of a class that says it holds some: annotated fields, or what its constructor takes."""
    if not node.name.endswith(("Config", "Settings", "Args", "Options", "Stage")):
        return 0
    fields = sum(isinstance(each, ast.AnnAssign) for each in node.body)
    made = next((each for each in node.body if isinstance(each, FUNCTION) and each.name == "__init__"), None)
    return max(fields, len(made.args.args) + len(made.args.kwonlyargs) - 1 if made else 0)


def _ratio(tests: Iterable[Path], source: int) -> float | None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests)
    return round(lines / source, 2) if lines else None


def cycles(trees: Mapping[str, ast.Module]) -> int:
    """Groups of modules that import each other when they are imported, directly or through others."""
    graph = {name: set(_imports(name, tree, trees)) - {name} for name, tree in trees.items()}
    reach = {name: _reach(name, graph) for name in graph}
    tied = {name: frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return len({group for group in tied.values() if group})


def _reach(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for following in graph[waiting.pop()] - seen:
            seen.add(following)
            waiting.append(following)
    return seen


def _imports(name: str, tree: ast.Module, known: Mapping[str, object]) -> Iterator[str]:
    for node in _at_import(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if _is_package(name, known) else name.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in known:
                    yield whole
                elif base in known:
                    yield base


def _is_package(name: str, known: Mapping[str, object]) -> bool:
    return any(other.startswith(f"{name}.") for other in known)


def _at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, without those that only a type checker reads."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, (*FUNCTION, ast.ClassDef)):
                parts = getattr(node, inner, [])
                yield from _at_import(
                    [each for part in parts for each in (part.body if isinstance(part, ast.ExceptHandler) else [part])]
                )


def modules_of(package: Path) -> dict[str, Path]:
    """Every module of a package folder by its name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def ours() -> Figures:
    """This repository: its packages, and all of its tests."""
    modules = {name: path for package in OURS for name, path in modules_of(ROOT / package).items()}
    return measure(modules, (ROOT / "tests").rglob("*.py"))


def installed(package: str) -> Figures:
    """A package as it is installed here; its tests are not."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None, f"{package} has no file"
    return measure(modules_of(Path(spec.origin).parent))


def peer(wheel: Path | None) -> Figures:
    """The serving layer of the peer, from its wheel."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if wheel is None:
            command = ["pip", "download", "-qq", "--no-deps", "--only-binary", ":all:", "-d", folder, PEER]
            subprocess.run([sys.executable, "-m", *command], check=True)
            wheel = next(root.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.startswith(PEER_FOLDERS) and name.endswith(".py")]
            archive.extractall(root, wanted)
        return measure(modules_of(root / "sglang"))


def wrong_sides(columns: Mapping[str, Figures]) -> list[str]:
    """Rows in which ours is worse than the worst model, in words."""
    wrong = []
    for row, words in ROWS.items():
        sign = -1 if row in MORE_IS_BETTER else 1
        values = {name: asdict(figures)[row] for name, figures in columns.items()}
        models = [sign * values[name] for name in MODELS if values[name] is not None]
        if models and sign * values["ours"] > max(models):
            wrong.append(f"{words}: ours {values['ours']}, the models {[values[name] for name in MODELS]}")
    return wrong


def table(columns: Mapping[str, Figures]) -> str:
    """Markdown; a dash where a wheel holds no tests."""
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row, words in ROWS.items():
        values = [asdict(figures)[row] for figures in columns.values()]
        lines.append(f"| {words} | {' | '.join('-' if value is None else f'{value:,}' for value in values)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and say whether every row is on the models' side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"the wheel of {PEER}")
    parser.add_argument("--write", action="store_true", help="put the table into CONTRIBUTING.md")
    parser.add_argument("--models-only", action="store_true", help=f"leave {PEER} out, which is downloaded")
    arguments = parser.parse_args()
    if arguments.write and arguments.models_only:
        parser.error("--write puts the whole table down: not without a column")
    columns = {"ours": ours(), **{name: installed(name) for name in MODELS}}
    if not arguments.models_only:
        columns[PEER] = peer(arguments.wheel)
    print(table(columns))
    if arguments.json:
        figures = {name: asdict(each) for name, each in columns.items()}
        write_json(arguments.json, {"provenance": provenance(sys.argv), "figures": figures})
    if arguments.write:
        _write(ROOT / "CONTRIBUTING.md", table(columns))
    for line in (wrong := wrong_sides(columns)):
        print(f"wrong side: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _write(path: Path, text: str) -> None:
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
