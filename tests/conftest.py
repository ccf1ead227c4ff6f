"""Eight virtual CPU devices, a compile cache and two meshes for every test."""

import gc
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

NUM_DEVICES = 8
# XLA's older code generator compiles in a third of the time. It is gone in jaxlib 0.11,
# and does less: see `usual_code_generator`. HLO differs little, collectives do not.
QUICK_COMPILING = (
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
IS_FUZZ = "AUTOPAR_FUZZ_EXAMPLES" in os.environ
COMPILES_QUICKLY = (
    "pytest" in sys.modules  # not if a script of tests/fuzz imports this
    and not IS_FUZZ
    and metadata.version("jaxlib").startswith("0.10.")
)
COMPILE_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"

# All of this is read when jax is first imported, and by subprocesses of the tests.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={NUM_DEVICES}"
    # Compiling takes longer than running here; this changes machine code, never HLO.
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # With XLA's default CPU scheduler a program of tests/fuzz crashes the process in 7
    # of 7 runs (segfault, or too many participants in an all-reduce), so in 0 of 5.
    + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    + (QUICK_COMPILING if COMPILES_QUICKLY else "")
)
# Fewer threads than twice the devices can deadlock when steps overlap.
os.environ.setdefault("NPROC", str(2 * NUM_DEVICES))
os.environ.setdefault("AUTOPAR_CACHE_DIR", "off")
os.environ.setdefault("AUTOPAR_TARGETS", "off")  # programs are those of CPU devices
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILE_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax._src import compiler  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402
from xdist.scheduler import LoadFileScheduling  # noqa: E402

# The same examples on every run, unless `make fuzz` asks for many fresh ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("AUTOPAR_FUZZ_EXAMPLES", "100")),
    deadline=None,
    print_blob=True,
)
settings.load_profile("fuzz" if IS_FUZZ else "repeatable")

gc.set_threshold(50_000)  # seventy times the usual: jaxprs of many tests stay alive
sys.dont_write_bytecode = False  # whoever forbids it pays 8 seconds a process
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """What was imported is never garbage: no collection goes through it again."""
    gc.freeze()


@pytest.fixture
def mesh_1d() -> Mesh:
    """All eight devices on one axis, `x`."""
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture
def mesh_2d() -> Mesh:
    """Eight devices as two rows of four: axes `x` and `y`."""
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def usual_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA compiles as it does for users: its older generator has failures of its own.

    It writes out of bounds where a dim is longer than its index type can say.
    """
    if not COMPILES_QUICKLY:
        return
    options = compiler.get_compile_options

    def usual(*args: Any, env_options_overrides: Any = None, **more: Any) -> Any:
        overrides: dict[str, Any] = {"xla_cpu_use_fusion_emitters": True}
        overrides |= env_options_overrides or {}
        return options(*args, env_options_overrides=overrides, **more)

    monkeypatch.setattr(compiler, "get_compile_options", usual)


class OneProcessAFile(LoadFileScheduling):
    """Tests of a file share fixtures, those of `ray` one cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if "/ray/" in nodeid else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How `pytest -n 2 --dist loadfile` deals out tests."""
    if config.getvalue("dist") == "loadfile":
        return OneProcessAFile(config, log)
    return None
