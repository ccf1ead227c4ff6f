"""Row MTF-7 of Mesh-TensorFlow: the layout that holds the least memory, found."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import autopar
from autopar.clusters.cluster import Cluster
from autopar.graph.op_graph import OpGraph
from autopar.lowering.memory_use import MemoryUse
from autopar.planner.auto_layout import auto_layout
from autopar.sharding.mesh import MeshShape, parse_mesh
from tests.rows.fixtures import Case, f1, f3
from tests.rows.named_plans import graph_of
from tests.rows.running import run_as_planned

MESHES = {"2x2": (2, 2), "2x4": (2, 4)}
F1_NAMES = {"params['w']": "io hidden", "params['v']": "hidden io"}
F3_NAMES = {
    "params['qkv']": "h - heads d",
    "params['up']": "h d_ff",
    "x": "batch length h",
}
CASES: dict[str, tuple[Case, dict[str, str]]] = {
    "F1": (f1(), F1_NAMES),
    "F3": (f3(), F3_NAMES),
}


def mesh_of(name: str) -> Mesh:
    sizes = MESHES[name]
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("r", "c"))


def legal_layouts(
    case: Case, names: dict[str, str], mesh: Mesh
) -> Iterator[tuple[int, int, str]]:
    """Peak, unsplit dims and rules of every layout that is no error."""
    dims = sorted({n for words in names.values() for n in words.split()} - {"-"})
    dims = sorted({*dims, "batch"})
    axes = mesh.axis_names
    for chosen in product((None, *axes), repeat=len(dims)):
        pairs = [f"{n}:{a}" for n, a in zip(dims, chosen, strict=True) if a is not None]
        rules = autopar.LayoutRules(";".join(pairs), names)
        try:
            plan = autopar.parallelize(case.step, mesh=mesh, method=rules).plan(
                *case.args
            )
        except ValueError:
            continue
        yield plan.predicted.peak_bytes, len(dims) - len(pairs), rules.rules


def as_pairs(rules: str) -> set[str]:
    return set(filter(None, rules.split(";")))


def found_layout(case: Case, names: Any, mesh: Mesh) -> tuple[int, set[str], int]:
    """Peak and rules of the layout found, and how many layouts were planned."""
    graph, shape = graph_of(case), parse_mesh(mesh)
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    rules = autopar.LayoutRules("auto", names)
    place: tuple[OpGraph, MeshShape, Cluster] = graph, shape, Cluster.local()
    found = auto_layout(rules, *place, batch, 2**40)
    return found.peak_bytes, as_pairs(found.rules.rules), found.num_planned


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["F1", pytest.param("F3", marks=pytest.mark.slow)])
def test_mtf_7_the_peak_is_that_of_the_best_of_all_layouts(
    name: str, mesh: str
) -> None:
    """And no layout of that peak splits more dims; few layouts are planned for it."""
    case, names = CASES[name]
    every = list(legal_layouts(case, names, mesh_of(mesh)))
    least, num_whole, _ = min(every)
    peak, rules, num_planned = found_layout(case, names, mesh_of(mesh))
    assert peak == least
    assert (peak, num_whole, rules) in [(p, n, as_pairs(text)) for p, n, text in every]
    assert num_planned < len(every)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_mtf_7_the_layout_runs_in_the_memory_predicted(name: str, mesh: str) -> None:
    case, names = CASES[name]
    method = autopar.LayoutRules("auto", names)
    step = autopar.parallelize(case.step, mesh=mesh_of(mesh), method=method)
    compiled = run_as_planned(step, *case.args)
    measured = MemoryUse.of(compiled.compiled).device_bytes
    predicted = compiled.plan.predicted
    assert predicted.memory_correction == 1.0
    assert 0.7 < predicted.peak_bytes / measured < 1.35


def test_mtf_7_without_names_every_dim_of_the_arguments_may_be_split() -> None:
    """What comes in and what goes out of F1 are then two dims, which share an axis."""
    case, names = CASES["F1"]
    named, _, _ = found_layout(case, names, mesh_of("2x2"))
    unnamed, rules, _ = found_layout(case, None, mesh_of("2x2"))
    assert unnamed == named
    assert rules in (  # the axes are alike
        {"params_v_0:r", "params_w_0:c", "params_v_1:c"},
        {"params_v_0:c", "params_w_0:r", "params_v_1:r"},
    )


def test_mtf_7_the_least_memory_of_all_plans_is_no_more() -> None:
    """Plans may also gather, and move dims, which a layout cannot."""
    case, names = CASES["F1"]
    peak, _, _ = found_layout(case, names, mesh_of("2x2"))
    method = autopar.ShardParallel(objective="memory")
    step = autopar.parallelize(case.step, mesh=mesh_of("2x2"), method=method)
    compiled = run_as_planned(step, *case.args)
    predicted = compiled.plan.predicted
    assert predicted.peak_bytes <= peak
    fastest = autopar.parallelize(case.step, mesh=mesh_of("2x2")).plan(*case.args)
    assert predicted.step_seconds >= fastest.predicted.step_seconds


def test_mtf_7_auto_is_a_method_and_no_rule() -> None:
    with pytest.raises(ValueError, match="cannot be 'auto'"):
        autopar.parallelize(np.sin, rules="auto")
    with pytest.raises(ValueError, match="'time' or 'memory'"):
        method: Any = autopar.ShardParallel(objective="money")  # type: ignore[arg-type]
        autopar.parallelize(np.sin, method=method)
