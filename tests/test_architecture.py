"""Holds the borders between the folders, and the size and names of files."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "autopar": "autopar",
    "solver": "autopar.solver",
    "runtime": "autopar.runtime",
}
FOLDER_ORDER: Sequence[str] = """
    errors jax_compat cache_folder solver graph sharding clusters targets option_values
    state rules attention plans costs frontend microbatches transforms rematerialisation
    lowering audit methods options planner pipelines runtime report steps data api
    comparison training adascale_gain commands cli __main__
""".split()
RUNTIME_MAY_IMPORT = (
    "plans.plan",
    "lowering.programs",
    "lowering.exported_program",
    "clusters.cluster",
    "clusters.ray_hosts",
    "clusters.ray_discovery",
    "state.examples",
    "state.distributed_array",
    "errors",
    "runtime",
)
# Only files of the runtime, and the one that finds hosts, know ray, so these ask them:
# to start a local cluster, and what hosts can be sent.
RAY_QUESTIONS = {
    "autopar.commands.launch": ("autopar.runtime.ray_local",),
    "autopar.data.batches": ("autopar.runtime.ray_sources",),
}
PRIVATE_JAX = ("jaxlib", "jax._", "jax.core", "jax.interpreters")
JUNK_DRAWERS = {"util", "helper", "common", "manager", "core", "misc"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_LINES = 650
FOLDER_LINES = "tests/folder_lines.toml"


@dataclass(frozen=True)
class Import:
    """One imported module, or one dotted name that starts with `jax`."""

    module: str
    line: int
    is_lazy: bool


@dataclass(frozen=True)
class SourceFile:
    """One Python file of ours, under the name it is imported by."""

    path: Path
    module: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        found: list[Import] = []
        nodes: list[tuple[ast.AST, bool]] = [(self.tree, False)]
        while nodes:
            node, is_lazy = nodes.pop()
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = self._imported(node)
                found += (Import(module, node.lineno, is_lazy) for module in modules)
            elif isinstance(node, ast.Attribute):
                dotted = _dotted(node)
                if dotted.startswith("jax."):
                    found.append(Import(dotted, node.lineno, is_lazy))
            is_lazy = is_lazy or isinstance(node, FUNCTIONS) or _is_typing(node)
            nodes += ((child, is_lazy) for child in ast.iter_child_nodes(node))
        return tuple(found)

    def _imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        package = self.module.split(".")
        if self.path.name != "__init__.py":
            package = package[:-1]
        base = package[: len(package) - node.level + 1] if node.level else []
        prefix = ".".join([*base, *([node.module] if node.module else [])])
        yield from (f"{prefix}.{alias.name}" for alias in node.names)


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of attributes of a name, and nothing of those of other expressions."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def _source_file(path: Path) -> SourceFile:
    folder, *inside = path.relative_to(ROOT).with_suffix("").parts
    names = [PACKAGES.get(folder, folder), *inside]
    if names[-1] == "__init__":
        names.pop()
    return SourceFile(path, ".".join(names))


def _files(*folders: str) -> tuple[SourceFile, ...]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return tuple(_source_file(path) for path in paths)


OURS = _files(*PACKAGES)
EVERYTHING = (*OURS, *_files("tests", "benchmarks", "examples"))


def _is_within(module: str, *packages: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def _violations(
    files: tuple[SourceFile, ...], is_forbidden: Callable[[SourceFile, Import], bool]
) -> list[str]:
    return [
        f"{file.path.relative_to(ROOT)}:{found.line} imports {found.module}"
        for file in files
        for found in file.imports
        if is_forbidden(file, found)
    ]


def test_the_solver_knows_neither_jax_nor_us() -> None:
    def is_forbidden(_: SourceFile, found: Import) -> bool:
        is_ours = _is_within(found.module, "autopar", "benchmarks", "tests")
        return _is_within(found.module, "jax", "jaxlib") or (
            is_ours and not _is_within(found.module, "autopar.solver")
        )

    assert not _violations(_files("solver"), is_forbidden)


def test_the_runtime_reads_only_plans_programs_clusters_and_errors() -> None:
    allowed = tuple(f"autopar.{name}" for name in RUNTIME_MAY_IMPORT)

    def is_forbidden(_: SourceFile, found: Import) -> bool:
        is_ours = _is_within(found.module, "autopar", "benchmarks", "tests")
        return is_ours and not _is_within(found.module, *allowed)

    assert not _violations(_files("runtime"), is_forbidden)


def test_only_the_api_and_what_it_executes_with_import_the_runtime() -> None:
    def is_forbidden(file: SourceFile, found: Import) -> bool:
        asks_ray = found.is_lazy and _is_within(
            found.module, *RAY_QUESTIONS.get(file.module, ())
        )
        return (
            file.module not in ("autopar.api", "autopar.steps.execution")
            and not asks_ray
            and _is_within(found.module, "autopar.runtime")
        )

    assert not _violations(_files("autopar"), is_forbidden)


def test_solver_and_runtime_go_by_their_installed_names() -> None:
    def is_forbidden(_: SourceFile, found: Import) -> bool:
        return _is_within(found.module, "solver", "runtime")

    words = re.compile(r"\b(solver|runtime)\b")  # no import without one of them
    files = tuple(file for file in EVERYTHING if words.search(file.text))
    assert not _violations(files, is_forbidden)


def test_ray_is_imported_lazily_by_its_own_files_only() -> None:
    def is_forbidden(file: SourceFile, found: Import) -> bool:
        is_ray_file = file.module.startswith(
            ("autopar.runtime.ray_", "autopar.clusters.ray_discovery")
        )
        return _is_within(found.module, "ray") and not (is_ray_file and found.is_lazy)

    assert not _violations(OURS, is_forbidden)


def test_private_jax_is_imported_by_one_file() -> None:
    def is_forbidden(file: SourceFile, found: Import) -> bool:
        is_private = _is_within(found.module, *PRIVATE_JAX) or any(
            part.startswith("_") and not part.startswith("__")
            for part in found.module.split(".")
            if _is_within(found.module, "jax")
        )
        return is_private and file.module != "autopar.jax_compat"

    assert not _violations(OURS, is_forbidden)


def test_no_import_cycle_even_through_lazy_imports() -> None:
    modules = {file.module for file in OURS}
    graph = nx.DiGraph()
    for file in OURS:
        for found in file.imports:
            target = found.module
            if target not in modules:
                target = target.rpartition(".")[0]
            if target in modules and target != file.module:
                graph.add_edge(file.module, target)
    groups = nx.strongly_connected_components(graph)
    assert not [group for group in groups if len(group) > 1]


def _part(module: str) -> str:
    """The folder, or the file of autopar/, that holds a module; "" of none of ours."""
    package, *inside = module.split(".")
    return inside[0] if package == "autopar" and inside else ""


def test_a_folder_imports_only_folders_before_it() -> None:
    def is_forbidden(file: SourceFile, found: Import) -> bool:
        own, other = _part(file.module), _part(found.module)
        if not own or other not in FOLDER_ORDER:
            return False
        return FOLDER_ORDER.index(other) > FOLDER_ORDER.index(own)

    assert not _violations(OURS, is_forbidden), (
        "move the data type or function that both need to the earlier folder"
    )
    missing = {_part(file.module) for file in OURS} - {"", *FOLDER_ORDER}
    assert not missing, f"{missing} must have a place in FOLDER_ORDER"


def _folder(path: Path) -> str:
    """The folder in autopar/, `top` for its own files, or solver or runtime."""
    package, *inside = path.relative_to(ROOT).parts
    if package != "autopar":
        return package
    return inside[0] if len(inside) > 1 else "top"


def test_no_folder_has_more_lines_than_it_had() -> None:
    most = tomllib.loads((ROOT / FOLDER_LINES).read_text())
    lines: Counter[str] = Counter()
    for file in OURS:
        lines[_folder(file.path)] += file.text.count("\n")
    lines["total"] = lines.total()
    grown = [
        f"{folder} has {number:,} lines and may have {most.get(folder, 0):,}"
        for folder, number in sorted(lines.items())
        if number > most.get(folder, 0)
    ]
    assert not grown, (
        f"lines of a folder may only fall, but {'; '.join(grown)}: delete or join what "
        f"does the same, or move code to the folder of its noun and its number with it "
        f"in {FOLDER_LINES}; the total stays."
    )


def test_a_file_is_short_well_named_and_hides_no_error() -> None:
    assert not [fault for file in EVERYTHING for fault in _faults(file)]


def _faults(file: SourceFile) -> Iterator[str]:
    num_lines = len(file.text.splitlines())
    if num_lines > MAX_LINES:
        yield f"{file.module}: {num_lines} lines: split it by its nouns"

    words = {word.rstrip("s") for word in file.path.stem.split("_")}
    if words & JUNK_DRAWERS:
        yield f"{file.module}: a function lives with its noun"

    for node in ast.walk(file.tree) if "except" in file.text else ():
        if isinstance(node, ast.ExceptHandler):
            catches_all = node.type is None or ast.unparse(node.type) in (
                "Exception",
                "BaseException",
            )
            is_silent = all(isinstance(step, ast.Pass) for step in node.body)
            if catches_all and is_silent:
                yield f"{file.module}: line {node.lineno} hides errors"
