"""What is installed is what is here, and nothing of this machine is committed."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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


def test_an_uninstalled_checkout_imports_past_a_users_own_solver(
    tmp_path: Path,
) -> None:
    (tmp_path / "solver.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "runtime.py").write_text("raise RuntimeError('shadowed')")
    code = "import autopar, autopar.solver, autopar.runtime; print(autopar.__file__)"
    assert _run(code, tmp_path, ROOT) == str(ROOT / "autopar" / "__init__.py")


def test_autopar_imports_without_any_optional_package(tmp_path: Path) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))\n"
    code += "from autopar import *"
    _run(code, tmp_path, ROOT)


def test_importing_autopar_starts_no_device(tmp_path: Path) -> None:
    code = (
        "import os; os.environ.pop('XLA_FLAGS'); from autopar import *; import jax;"
        "jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    assert _run(code, tmp_path, ROOT) == "3"


def test_the_wheel_holds_every_package_and_works_from_another_folder(
    tmp_path: Path,
) -> None:
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
    imports = "".join(f"import {package};" for package in sorted(_packages()))
    printed = _run(imports + "print(autopar.__file__)", tmp_path, site)
    assert printed == str(site / "autopar" / "__init__.py")
    plan = 'sys.argv = "autopar plan mlp --mesh x:8 --no-compare".split(); main()'
    command = f"import sys; from autopar.cli import main; {plan}"
    assert "heavy operators" in _run(command, tmp_path, site)


def test_importing_autopar_takes_no_longer_than_importing_jax(tmp_path: Path) -> None:
    """At most 1.3 times; nothing of what only planning or running takes is imported."""
    late = ("pulp", "networkx", "scipy", "rich", "autopar.pipelines", "autopar.runtime")
    code = (
        "import autopar, sys, time; first = time.process_time(); import jax; "
        f"print([name for name in {late} if name in sys.modules]); "
        "print(first < 1.3 * (time.process_time() - first))"
    )
    assert _run(code, tmp_path, ROOT).split("\n") == ["[]", "True"]


def test_every_public_name_is_where_the_stub_says(tmp_path: Path) -> None:
    code = (
        "import autopar; names = {n: getattr(autopar, n) for n in autopar.__all__};"
        "print(len(names), set(names) <= set(dir(autopar)))"
    )
    number, is_listed = _run(code, tmp_path, ROOT).split()
    assert int(number) > 40 and is_listed == "True"
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
