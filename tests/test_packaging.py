"""What is installed is what is here, and nothing of this machine is committed."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import autopar

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "autopar": "autopar",
    "autopar.models": "benchmarks/models",
    "autopar.runtime": "runtime",
    "autopar.solver": "solver",
}
OPTIONAL = "equinox flax haiku jinja2 keras optax orbax plotly ray".split()
# Package registries, and paths as only a particular machine has them.
OF_THIS_MACHINE = re.compile(
    r"pypi\.(org|python)|pythonhosted\.|registry\.npm|index-(url)|find-(links)"
    r"|(?<![\w.~-])/(home|root|work|Users|opt|mnt)/\w"
)


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def _packages() -> set[str]:
    return set(_setup()["options"]["packages"].split())


def _run(code: str, folder: Path, *path: Path) -> str:
    """What `code` prints when run from `folder` with `path` to import from."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_folder_with_code_is_listed_as_a_package() -> None:
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert _packages() == found


def test_the_folders_of_the_checkout_are_mapped_as_the_design_says() -> None:
    lines = _setup()["options"]["package_dir"].split("\n")
    mapping = dict(line.split(" = ") for line in lines if line)
    assert mapping == FOLDERS


IMPORTS = """
import autopar, json, os, sys, time
first = time.process_time()
import jax
seconds = time.process_time() - first
early = list(sys.modules)
names = {name: getattr(autopar, name) for name in autopar.__all__}
from autopar import *
import autopar.solver, autopar.runtime
os.environ.pop("XLA_FLAGS")
jax.config.update("jax_num_cpu_devices", 3)
devices = jax.device_count()
autopar.parallelize(lambda x: x + 1)(jax.numpy.ones(6))
print(json.dumps({
    "file": autopar.__file__, "seconds": [first, seconds], "early": early,
    "names": [len(names), set(names) <= set(dir(autopar))], "devices": devices,
    "all": [name.partition(".")[0] for name in sys.modules],
}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process sees that imports an uninstalled checkout and runs a step."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "solver.py").write_text("raise RuntimeError('shadowed')")
    (folder / "runtime.py").write_text("raise RuntimeError('shadowed')")
    return json.loads(_run(IMPORTS, folder, ROOT))


def test_an_uninstalled_checkout_imports_past_a_users_own_solver(
    imported: dict[str, Any],
) -> None:
    assert imported["file"] == str(ROOT / "autopar" / "__init__.py")


def test_importing_autopar_starts_no_device(imported: dict[str, Any]) -> None:
    assert imported["devices"] == 3


def test_a_step_imports_neither_flax_nor_equinox(imported: dict[str, Any]) -> None:
    assert not {"flax", "equinox"} & {*imported["all"]}


def test_the_wheel_holds_every_package_and_works_from_another_folder(
    tmp_path: Path,
) -> None:
    """`from autopar import *` without any optional package, models with theirs."""
    source = tmp_path / "source"  # a copy: building leaves folders behind
    source.mkdir()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS.values():
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=source,
        check=True,
        capture_output=True,
    )

    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    assert (site / "autopar" / "py.typed").exists()
    tables = {
        str(path.relative_to(ROOT)) for path in (ROOT / "autopar").rglob("*.toml")
    }
    assert {str(path.relative_to(site)) for path in site.rglob("*.toml")} == tables
    assert "autopar/targets/gpu_specs.toml" in tables
    assert (site / "autopar" / "report" / "report.html").exists()
    code = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL}))
from autopar import *
for name in {OPTIONAL}:
    del sys.modules[name]
import {", ".join(sorted(_packages()))}
print(autopar.__file__)
from autopar.cli import main
sys.argv = "autopar plan mlp --mesh x:8 --no-compare".split()
main()
"""
    printed = _run(code, tmp_path, site)
    assert printed.split("\n")[0] == str(site / "autopar" / "__init__.py")
    assert "heavy operators" in printed


def test_importing_autopar_takes_no_longer_than_importing_jax(
    imported: dict[str, Any],
) -> None:
    """At most 1.3 times; nothing of what only planning or running takes is imported."""
    late = {"pulp", "networkx", "scipy", "rich", "autopar.pipelines", "autopar.runtime"}
    assert not late & {*imported["early"]}
    ours, of_jax = imported["seconds"]
    assert ours < 1.3 * of_jax


def test_every_public_name_is_where_the_stub_says(imported: dict[str, Any]) -> None:
    number, is_listed = imported["names"]
    assert number > 40 and is_listed
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'no'"):
        getattr(autopar, "no")  # noqa: B009


def test_no_committed_file_names_a_registry_or_a_path_of_this_machine() -> None:
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_symlink():
            text = os.readlink(path)
        elif path.is_file():
            text = path.read_bytes().decode(errors="replace")
        else:
            continue  # deleted, not yet committed as such
        found += [
            f"{name}: {match.group()}" for match in OF_THIS_MACHINE.finditer(text)
        ]
    assert not found
