"""Which compilers of absent devices are installed, and how they are added and removed.

JAX's plugins go into a folder of their own, not into the environment of the user, whose
`import jax` would load them: only child processes that compile see the folder, beside
the packages of this environment. So the compilers always have this jax's version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..cache_folder import base_folder
from ..errors import TargetError

VARIABLE = "AUTOPAR_TARGETS"
PLATFORMS = ("cuda", "tpu")
_PTXAS = "nvidia-cuda-nvcc-cu12"
_CUDNN = "nvidia-cudnn-cu12"
_EXTRAS = {"cuda": ("cuda12-local", "jax-cuda12-plugin"), "tpu": ("tpu", "libtpu")}
_MODULES = {"cuda": "jax_plugins.xla_cuda12", "tpu": "libtpu"}


@dataclass(frozen=True)
class Compilers:
    """Those of one platform; `folder` is None if this environment has them itself."""

    platform: str
    folder: Path | None

    def paths(self) -> tuple[str, ...]:
        """What a process that compiles imports from, besides what this one does."""
        return () if self.folder is None else (str(self.folder),)


def find(platform: str) -> Compilers | None:
    """The compilers of a platform for this jax, or None."""
    folder = folder_of(platform)
    if folder is not None and folder.is_dir():
        return Compilers(platform, folder)
    try:
        is_here = find_spec(_MODULES[platform]) is not None
    except ModuleNotFoundError:
        is_here = False
    return Compilers(platform, None) if is_here else None


def needed(platform: str) -> Compilers:
    """As `find`.

    Raises:
      TargetError: they are not installed, or only for another version of jax.
    """
    found = find(platform)
    if found is not None:
        return found
    _check_platform(platform)
    others = [path.name for path in sorted(root().glob(f"{platform}-*"))]
    said = f"has those of {', '.join(others)}" if others else "has none"
    raise TargetError(
        f"Compiling for {platform} devices that are not here takes their compiler for "
        f"jax {_jax_version()}, but {root()} {said}; run: autopar targets add "
        f"{platform}"
    )


def add(platform: str, *, cudnn: bool = False) -> Path:
    """Install the compilers of a platform for this jax; returns their folder.

    `cudnn` adds NVIDIA's 717 MB that only fused attention is compiled with.

    Raises:
      TargetError: an unknown platform, or pip fails; nothing half-made is left.
    """
    _check_platform(platform)
    folder = folder_of(platform)
    if folder is None:
        raise TargetError(
            f"Compilers are kept in the folder that {VARIABLE} names, but it is "
            f"{os.environ[VARIABLE]!r}; unset it, or give --path."
        )
    wanted = requirements(platform, cudnn=cudnn)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".part") as made:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--target", made, *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-3:]
            raise TargetError(
                f"pip must install {' '.join(wanted)}, but it failed: "
                f"{' '.join(last)}. With another installer: uv pip install --no-deps "
                f"--target {folder} {' '.join(wanted)}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        Path(made).chmod(0o755)  # a shared folder is read by others, too
        Path(made).rename(folder)
        Path(made).mkdir()  # for the context manager to remove
    return folder


def remove(platform: str) -> tuple[Path, ...]:
    """Remove the compilers of a platform, of all versions; returns their folders."""
    _check_platform(platform)
    folders = tuple(sorted(root().glob(f"{platform}-*")))
    for folder in folders:
        shutil.rmtree(folder)
    return folders


def requirements(platform: str, *, cudnn: bool = False) -> Sequence[str]:
    """What pip installs: the plugins that jax itself names for its version."""
    extra, package = _EXTRAS[platform]
    pattern = re.compile(rf'({package})(\S+); extra == "{extra}"')
    for text in metadata.requires("jax") or ():
        if found := pattern.fullmatch(text):
            name, versions = found.groups()
            if platform == "tpu":
                return [name + versions]
            pjrt = name.replace("plugin", "pjrt")
            wanted = [name + versions, pjrt + versions, _PTXAS]
            return [*wanted, *([_CUDNN] if cudnn else [])]
    raise NotImplementedError(
        f"Compilers for {platform} come with jax's extra {extra!r}, which jax "
        f"{_jax_version()} does not have; use jax 0.10 or 0.11."
    )


def folder_of(platform: str) -> Path | None:
    """Where the compilers for this jax and Python are kept; None if switched off."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    folder = root()
    if folder == Path("off"):
        return None
    return folder / f"{platform}-jax{_jax_version()}-{python}"


def root() -> Path:
    """The folder of all compilers; `off` if they are switched off."""
    given = os.environ.get(VARIABLE)
    return base_folder() / "targets" if given is None else Path(given).expanduser()


def _check_platform(platform: str) -> None:
    if platform not in PLATFORMS:
        raise TargetError(
            f"Compilers can be added for {', '.join(PLATFORMS)}, but got {platform!r}."
        )


def _jax_version() -> str:
    return metadata.version("jax")
