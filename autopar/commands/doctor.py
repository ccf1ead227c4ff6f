"""`autopar doctor`: checks that this installation can plan and run, with remedies."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import cast

_PACKAGES = ("autopar", "jax", "jaxlib", "numpy", "pulp", "highspy", "networkx", "ray")
_NUM_VIRTUAL = 8
_TIMEOUT_SECONDS = 120

# Runs in a process of its own, as the number of devices is fixed once jax is used.
_COLLECTIVE = f"""
from autopar.clusters.virtual_devices import use_virtual_devices
use_virtual_devices({_NUM_VIRTUAL})
import jax
from jax.sharding import AxisType, Mesh, PartitionSpec as P
import numpy as np
mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
add = jax.shard_map(
    lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
)
print(float(jax.jit(add)(np.arange({_NUM_VIRTUAL}.0))[0]))
"""


@dataclass(frozen=True)
class Check:
    """One thing looked at; `remedy` says what to do where it is not ok."""

    name: str
    ok: bool
    seen: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{'ok  ' if self.ok else 'FAIL'}  {self.name:<16} {self.seen}"
        return line if self.ok or not self.remedy else f"{line}\n      -> {self.remedy}"


def run_checks() -> Iterator[Check]:
    """Every check, as soon as it is done."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    yield Check("python", True, f"{platform.python_version()} on {machine}")
    yield Check("packages", True, ", ".join(map(_version, _PACKAGES)))
    yield check_devices()
    yield check_solver()
    yield check_collective()


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def check_devices() -> Check:
    """What jax finds here."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return Check(
            "devices",
            False,
            str(error).splitlines()[0],
            "set JAX_PLATFORMS=cpu, or mend the accelerator's driver and jax plugin",
        )
    kinds = sorted({device.device_kind for device in devices})
    return Check("devices", True, f"{len(devices)} x {', '.join(kinds)}")


def check_solver() -> Check:
    """Whether HiGHS, through PuLP, solves a knapsack of three things."""
    import pulp

    remedy = "pip install --force-reinstall highspy pulp"
    problem = pulp.LpProblem("knapsack", pulp.LpMaximize)
    take = [pulp.LpVariable(f"take_{i}", cat="Binary") for i in range(3)]
    values, weights = (5, 4, 3), (2, 3, 1)
    problem += pulp.lpSum(v * x for v, x in zip(values, take, strict=True))
    problem += pulp.lpSum(w * x for w, x in zip(weights, take, strict=True)) <= 4
    try:
        problem.solve(pulp.HiGHS(msg=False))
    except Exception as error:  # A broken installation fails in many ways.
        return Check("HiGHS", False, f"{type(error).__name__}: {error}", remedy)
    best = float(cast("float", pulp.value(problem.objective)))
    return Check(
        "HiGHS", best == 8, f"a knapsack is worth {best:g} (8 is right)", remedy
    )


def check_collective() -> Check:
    """Whether virtual devices of a new process can add up numbers."""
    name = f"{_NUM_VIRTUAL} virtual CPUs"
    remedy = "reinstall jax and jaxlib of one version, or report this with the above"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COLLECTIVE],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Check(name, False, f"no sum within {_TIMEOUT_SECONDS} s", remedy)
    expected = sum(range(_NUM_VIRTUAL))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(name, False, f"exit code {done.returncode}: {last}", remedy)
    seen = done.stdout.strip()
    is_right = seen == str(float(expected))
    return Check(
        name, is_right, f"an all_reduce gives {seen} ({expected} is right)", remedy
    )
