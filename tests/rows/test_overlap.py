"""Communication beside computation, as the order of operations in compiled programs."""

import re
from dataclasses import replace
from math import isclose
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.clusters.cluster import Cluster
from autopar.clusters.cluster_file import to_toml
from autopar.methods.gather_again import graph_of_plan
from autopar.methods.methods import Method
from autopar.planner.transfers_ahead import AHEAD, graph_sent_ahead, send_ahead
from autopar.steps.lowered_step import Compiled
from autopar.steps.parallel_plan import Plan
from benchmarks.plan_price import plan_seconds
from tests.rows.fixtures import Case, f1, f6, random
from tests.rows.named_plans import graph_of
from tests.rows.running import run_as_planned, sent_bytes, traffic

NUM_DEVICES = 4
ROWS, DEPTH, COLUMNS = 256, 512, 512
LAYER_BYTES = 64 * 64 * 4  # of F6


def four_devices() -> Mesh:
    return Mesh(np.array(jax.devices()[:NUM_DEVICES]), ("x",))


def cluster(*, overlaps: bool, visible_fraction: float = 0.01) -> Cluster:
    """Virtual CPU devices; a product hides nearly all that is sent beside it."""
    preset = Cluster.preset("8xCPU")
    return replace(preset, overlaps=overlaps, visible_fraction=visible_fraction)


def gathered_rows() -> tuple[Case, dict[str, P]]:
    """A product whose left operand lies by rows, its right one and result by columns:
    what a column-split layer does in sequence parallelism."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return autopar.pin(x @ w, P(None, "x"))

    args = random(0, ROWS, DEPTH, scale=0.1), random(1, DEPTH, COLUMNS, scale=0.1)
    return Case(step, args), {"x": P("x"), "w": P(None, "x")}


def scattered_rows() -> tuple[Case, dict[str, P]]:
    """What a row-split layer does: contracted dims are split, the result's rows too."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return autopar.pin(x @ w, P("x", None))

    args = random(0, ROWS, DEPTH, scale=0.1), random(1, DEPTH, COLUMNS, scale=0.1)
    return Case(step, args), {"x": P(None, "x"), "w": P("x")}


def plans_without_and_with_overlap(case: Case, pins: dict[str, P]) -> list[Plan]:
    """Each is run, and its collectives audited."""
    steps = [
        autopar.parallelize(
            case.step,
            mesh=four_devices(),
            pins=pins,
            cluster=cluster(overlaps=overlaps),
        )
        for overlaps in (False, True)
    ]
    return [run_as_planned(step, *case.args).plan for step in steps]


def test_a_gather_beside_a_product_is_cut_in_permutes_of_equal_bytes() -> None:
    whole, parts = plans_without_and_with_overlap(*gathered_rows())
    assert traffic(whole) == {("all_gather", "x"): [ROWS * DEPTH * 4]}
    part = ROWS // NUM_DEVICES * DEPTH * 4
    assert traffic(parts) == {("collective_permute", "x"): [part] * (NUM_DEVICES - 1)}
    assert sent_bytes(whole) == sent_bytes(parts) == (NUM_DEVICES - 1) * part
    assert parts.predicted.step_seconds < whole.predicted.step_seconds
    assert parts.predicted.peak_bytes < whole.predicted.peak_bytes


def test_a_scattered_sum_beside_a_product_is_cut_in_permutes_of_equal_bytes() -> None:
    whole, parts = plans_without_and_with_overlap(*scattered_rows())
    part = ROWS // NUM_DEVICES * COLUMNS * 4
    assert traffic(whole) == {("reduce_scatter", "x"): [part]}
    assert traffic(parts) == {("collective_permute", "x"): [part] * (NUM_DEVICES - 1)}
    assert sent_bytes(whole) == sent_bytes(parts) == (NUM_DEVICES - 1) * part
    assert parts.predicted.step_seconds < whole.predicted.step_seconds


def kinds_in_order(text: str) -> str:
    """The permutes (>) and products (x) of the entry computation as it is scheduled."""
    assert "is_scheduled=true" in text
    entry = text[text.index("\nENTRY") :]
    found = re.findall(
        r"= \S+ (collective-permute|dot|custom-call|fusion)\(.*?"
        r'op_name="[^"]*/(ppermute|dot_general)"',
        entry,
    )
    return "".join(">" if name == "ppermute" else "x" for _, name in found)


@pytest.mark.parametrize("make", [gathered_rows, scattered_rows])
def test_permutes_and_products_alternate_in_the_compiled_program(make) -> None:
    case, pins = make()
    step = autopar.parallelize(
        case.step, mesh=four_devices(), pins=pins, cluster=cluster(overlaps=True)
    )
    order = kinds_in_order(run_as_planned(step, *case.args).as_text())
    assert order.count("x") == NUM_DEVICES
    assert order.strip("x") == ">x>x>"


def test_parts_are_not_taken_where_nothing_is_hidden() -> None:
    case, pins = gathered_rows()
    step = autopar.parallelize(
        case.step,
        mesh=four_devices(),
        pins=pins,
        cluster=cluster(overlaps=True, visible_fraction=1.0),
    )
    plan = step.plan(*case.args)
    assert traffic(plan) == {("all_gather", "x"): [ROWS * DEPTH * 4]}


@pytest.mark.parametrize("visible_fraction", [0.01, 0.3, 0.6])
def test_a_plan_of_parts_is_priced_as_it_was_predicted(visible_fraction: float) -> None:
    case, pins = gathered_rows()
    here = cluster(overlaps=True, visible_fraction=visible_fraction)
    step = autopar.parallelize(case.step, mesh=four_devices(), pins=pins, cluster=here)
    plan = step.plan(*case.args)
    seconds = plan_seconds(graph_of(case), plan.sharding, here)
    assert isclose(seconds, plan.predicted.step_seconds)


def test_the_plan_of_parts_is_kept_in_a_file(tmp_path) -> None:
    case, pins = gathered_rows()
    step = autopar.parallelize(
        case.step, mesh=four_devices(), pins=pins, cluster=cluster(overlaps=True)
    )
    step.plan(*case.args).save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    again = autopar.parallelize(case.step, mesh=four_devices(), plan=plan)
    assert ("collective_permute", "x") in traffic(
        run_as_planned(again, *case.args).plan
    )


def transfers_and_products(text: str) -> str:
    """Gathers (G), reductions (R), products (x) and barriers (|) as scheduled."""
    letters = {"all-gather": "G", "reduce-scatter": "R", "all-reduce": "R"}
    entry = text[text.index("\nENTRY") :]
    found = []
    for line in entry.splitlines():
        match = re.search(r"= .*? ([a-z-]+)\(", line)
        kind = match.group(1) if match else ""
        if kind in letters:
            found.append(letters[kind])
        elif kind == "opt-barrier":
            found.append("|")
        elif re.search(r'op_name="[^"]*/dot_general"', line):
            found.append("x")
    return "".join(found)


def test_a_cluster_file_says_whether_plans_overlap(tmp_path: Path) -> None:
    for overlaps in (False, True):
        path = tmp_path / f"{overlaps}.toml"
        path.write_text(to_toml(cluster(overlaps=overlaps)))
        assert Cluster.load(path).overlaps == overlaps
    assert not any(Cluster.preset(kind).overlaps for kind in ("8xCPU", "8xH100"))


def temporaries(compiled: Compiled) -> int:
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def compiled_with(case: Case, method: Method, *, overlaps: bool) -> Compiled:
    here = cluster(overlaps=overlaps, visible_fraction=1.0)
    step = autopar.parallelize(
        case.step, mesh=four_devices(), method=method, cluster=here
    )
    return run_as_planned(step, *case.args)


def gathered_at_products(order: str) -> list[int]:
    """How many gathers stand before each product."""
    return [order[:at].count("G") for at, each in enumerate(order) if each == "x"]


def test_parameters_are_gathered_while_the_layer_before_is_multiplied() -> None:
    """Eight layers, ZeRO-3; left alone, the compiler gathers some late or all early."""
    plain, ahead = (
        compiled_with(f6(), autopar.Zero(3), overlaps=each) for each in (False, True)
    )
    assert traffic(ahead.plan) == traffic(plain.plan)
    assert ahead.plan.predicted.step_seconds == plain.plan.predicted.step_seconds

    def is_ahead(order: str) -> bool:
        found = gathered_at_products(order)[:8]
        return all(min(n, 6) + 2 <= g <= n + 3 for n, g in enumerate(found))

    ordered = transfers_and_products(ahead.as_text())
    assert is_ahead(ordered) and ordered.count("G") == 15
    assert not is_ahead(transfers_and_products(plain.as_text()))
    assert temporaries(ahead) < 6 * LAYER_BYTES  # three whole layers at most


def test_gradients_are_reduced_behind_the_backward_pass() -> None:
    """Data parallel: each as soon as the products that it waits for are done."""
    plain, ahead = (
        compiled_with(f6(), autopar.DataParallel(), overlaps=each)
        for each in (False, True)
    )
    assert traffic(ahead.plan) == traffic(plain.plan)
    ordered = transfers_and_products(ahead.as_text())
    backward = ordered[ordered.index("R") :]
    assert ordered.count("R") >= 7
    # No two sums without products between them, but for the loss and the last ones.
    assert "RRR" not in ordered and backward.count("x") >= 6
    assert temporaries(ahead) < 10 * LAYER_BYTES  # 24 where all are summed as one


def test_memory_of_what_is_gathered_ahead_is_predicted() -> None:
    for method in (autopar.Zero(3), autopar.DataParallel()):
        compiled = compiled_with(f6(), method, overlaps=True)
        seen = MemoryUse.of(compiled.compiled, 0).device_bytes
        assert 0.75 < seen / compiled.plan.predicted.peak_bytes < 1.5


def test_an_order_that_does_not_fit_is_left_out() -> None:
    case = f6()
    plan = compiled_with(case, autopar.Zero(3), overlaps=False).plan.sharding
    graph = graph_of_plan(graph_of(case), plan)
    ahead = send_ahead(graph, plan)
    assert any(op.name.startswith(AHEAD) for op in ahead.operators)
    peak = ahead.predicted.peak_bytes
    assert send_ahead(graph, plan, peak) == ahead
    assert send_ahead(graph, plan, peak - 1) is plan


def test_a_plan_with_its_order_is_kept_in_a_file(tmp_path: Path) -> None:
    case = f6()
    compiled = compiled_with(case, autopar.Zero(3), overlaps=True)
    compiled.plan.save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    assert plan == compiled.plan
    step = autopar.parallelize(case.step, mesh=four_devices(), plan=plan)
    again = run_as_planned(step, *case.args)
    assert transfers_and_products(again.as_text()) == transfers_and_products(
        compiled.as_text()
    )


def test_an_order_is_priced_as_it_was_predicted() -> None:
    case, here = f6(), cluster(overlaps=True, visible_fraction=0.3)
    step = autopar.parallelize(
        case.step, mesh=four_devices(), method=autopar.Zero(3), cluster=here
    )
    plan = step.plan(*case.args).sharding
    graph = graph_sent_ahead(graph_of_plan(graph_of(case), plan), plan)
    assert isclose(plan_seconds(graph, plan, here), plan.predicted.step_seconds)


def test_another_step_is_told_apart_from_that_of_a_plan_with_an_order() -> None:
    plan = compiled_with(f6(), autopar.Zero(3), overlaps=True).plan
    other = f1()
    step = autopar.parallelize(other.step, mesh=four_devices(), plan=plan)
    with pytest.raises(autopar.PlanFileError):
        step.lower(*other.args)
