"""The Python blocks of the documentation run as they stand, and print what is shown."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.rules import base
from tests.marks import slow

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (
    "tutorial.md",
    "cost_model.md",
    "adding_a_rule.md",
    "how_to/flax.md",
    "how_to/equinox.md",
    "how_to/keras.md",
    "how_to/gpu_tpu.md",
    "how_to/plain_jit.md",
)
# Their libraries are in tests/examples too, plans for clusters in test_cli.py, and
# shardings for plain jit in test_comparison.py.
SLOW = (
    "how_to/flax.md",
    "how_to/equinox.md",
    "how_to/keras.md",
    "how_to/gpu_tpu.md",
    "how_to/plain_jit.md",
)
# Pages with a test of their own, and those without code.
ELSEWHERE = (
    "README.md",
    "change_one_thing.md",
    "checkpoints.md",
    "design.md",
    "how_to/benchmarks.md",
    "how_to/ray.md",
    "measurements.md",
    "pipelines_walk.md",
    "plan_format.md",
    "report.md",
    "roadmap.md",
    "walk.md",
)
BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


@pytest.fixture(autouse=True)
def _rules_are_restored() -> Iterator[None]:
    """A page may register a rule of its own."""
    before = dict(base._RULES)
    yield
    base._RULES.clear()
    base._RULES.update(before)


def names_in(path: Path) -> set[str]:
    """The functions and classes of a file, and the methods of these."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            methods = [each for each in inner if isinstance(each, ast.FunctionDef)]
            found.update(f"{node.name}.{each.name}" for each in methods)
    return found


def test_the_walk_through_a_pipeline_names_what_is_there() -> None:
    text = (DOCS / "pipelines_walk.md").read_text()
    links = re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", text)
    assert len(links) > 40
    missing = [
        f"{name}: {path}" for name, path in links if name not in names_in(DOCS / path)
    ]
    assert not missing


def test_every_page_is_tested() -> None:
    pages = (path for path in DOCS.rglob("*.md") if path.parent.name != "decisions")
    found = {path.relative_to(DOCS).as_posix() for path in pages}
    assert found == {*PAGES, *ELSEWHERE}


@pytest.mark.parametrize(
    "page",
    [slow(page) if page in SLOW else page for page in PAGES],
)
def test_a_page_runs_and_prints_what_it_shows(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks
    for number, (code, shown) in enumerate(blocks):
        exec(compile(code, f"{page}, block {number}", "exec"), names)
        printed = capsys.readouterr().out
        for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
            assert stripped(part) in stripped(printed), f"block {number}: {printed}"


def stripped(text: str) -> str:
    """Without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{path.name}: {target}"
        for path in DOCS.rglob("*.md")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert not broken
