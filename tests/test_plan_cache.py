"""Plans kept between processes: found again, kept apart, and never trusted blindly."""

import gzip
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autopar
import autopar.planner.plan_cache as plan_cache
from autopar.cache_folder import VARIABLE, cache_folder
from benchmarks.models import build


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh cache, switched on; JAX's own is left alone."""
    before = jax.config.values["jax_compilation_cache_dir"]
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    yield tmp_path / "cache"
    assert jax.config.values["jax_compilation_cache_dir"] == before


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sin(x @ y)


X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
Y = jax.ShapeDtypeStruct((32, 16), jnp.float32)


def plan(fun: Any = product, args: Any = (X, Y), **options: Any) -> autopar.Plan:
    return autopar.parallelize(fun, **options).plan(*args)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "plans").glob("*"))


def test_a_plan_is_found_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autopar"):
        first = plan()
        assert not [r for r in caplog.records if "plan from" in r.getMessage()]
        again = plan()
    (line,) = [r.getMessage() for r in caplog.records if "plan from" in r.getMessage()]
    (path,) = files(folder)
    assert str(path) in line
    assert again.sharding == first.sharding


def test_whatever_a_plan_depends_on_gives_it_a_file_of_its_own(folder: Path) -> None:
    def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x @ y) * 3.0

    def scaled_more(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x @ y) * 4.0

    h100 = autopar.Cluster.preset("8xH100")
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (product, (X, Y), {}),
        (product, (jax.ShapeDtypeStruct((128, 32), jnp.float32), Y), {}),
        (product, (X, Y), {"mesh": "a:4;b:2"}),
        (product, (X, Y), {"cluster": h100}),
        (product, (X, Y), {"pins": {"x": PartitionSpec(None, "x")}}),
        (product, (X, Y), {"memory_budget": "1GiB"}),
        (product, (X, Y), {"method": autopar.ShardParallel()}),
        (scaled, (X, Y), {}),
        (scaled_more, (X, Y), {}),
    ]
    for number, (fun, args, options) in enumerate(cases, 1):
        plan(fun, args, **options)
        assert len(files(folder)) == number, options
    for fun, args, options in cases:
        plan(fun, args, **options)
    assert len(files(folder)) == len(cases)


def test_other_code_of_autopar_makes_other_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan()
    monkeypatch.setattr(plan_cache, "_code", lambda: "changed")
    plan()
    assert len(files(folder)) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: gzip.compress(b"{}"),
        lambda data: gzip.compress(b"\xff\xfe"),
        lambda data: gzip.compress(gzip.decompress(data).replace(b"64", b"65")),
    ],
    ids=["empty", "cut", "no plan", "no text", "another plan"],
)
def test_a_damaged_file_is_ignored_and_made_anew(
    folder: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = plan()
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    again = plan()
    assert "cannot be read and is made anew" in caplog.text
    assert again.sharding == first.sharding
    assert plan().sharding == first.sharding  # and no warning this time
    assert gzip.decompress(path.read_bytes()) == gzip.decompress(whole)


@pytest.mark.parametrize("value", ["off", "0", "", "OFF"])
def test_the_cache_can_be_switched_off(
    folder: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert cache_folder() is None
    plan()
    assert not folder.exists()


def test_without_the_variable_it_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "autopar"


def test_a_folder_that_cannot_be_made_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))
    plan()
    plan(mesh="a:8")
    told = [r for r in caplog.records if "nothing is kept" in r.getMessage()]
    assert len(told) == 1


def test_the_oldest_plans_go_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 2)
    plan(mesh="a:8")
    (oldest,) = files(folder)
    os.utime(oldest, (0, 0))
    plan(mesh="b:8")
    plan(mesh="c:8")
    assert len(files(folder)) == 2 and oldest not in files(folder)


PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from autopar.clusters.virtual_devices import use_virtual_devices
use_virtual_devices(8)
import autopar
from benchmarks.models import build
workload = build("mlp", num_layers=1)
autopar.parallelize(workload.step).plan(*workload.abstract())
"""


def test_another_process_finds_the_plan(folder: Path) -> None:
    workload = build("mlp", num_layers=1)
    plan(workload.step, workload.abstract())
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        timeout=120,
    ).stderr
    assert "plan from" in printed and "planned" not in printed
