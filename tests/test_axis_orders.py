"""Specs whose axes of one dim are in another order than the mesh's, wherever named."""

from itertools import permutations, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import PlanFileError
from autopar.plans.record import Record
from autopar.plans.spec_text import SpecText
from autopar.sharding.group_names import GroupNames
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import (
    SUM,
    TURN,
    Spec,
    axes_of_dim,
    format_spec,
    from_partition_spec,
    to_partition_spec,
    turns_of,
    with_axes,
)
from tests.rows.fixtures import random
from tests.rows.running import homes, run_as_planned, run_pipeline_as_planned, traffic

NAMES = ("x", "y", "z")
CUBE = MeshShape(NAMES, (2, 2, 2))
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
TURNED = P(("y", "x"))
X, W = random(0, 16, 8), random(1, 8, 8)


def ordered_specs(rank: int, num_axes: int) -> list[Spec]:
    """Every spec of a tensor, axes of a dim in every order, sums included."""
    specs = []
    for spec in product((SUM, *range(-1, rank)), repeat=num_axes):
        axes = [axes_of_dim(spec, dim) for dim in range(rank)]
        for orders in product(*map(permutations, axes)):
            found = spec
            for dim, order in enumerate(orders):
                found = with_axes(found, dim, order)
            specs.append(found)
    return specs


def test_every_order_is_one_spec_and_one_partition_spec() -> None:
    specs = [spec for spec in ordered_specs(2, 3) if SUM not in spec]
    assert len(set(specs)) == len(specs) == 49
    said = {spec: to_partition_spec(spec, 2, NAMES) for spec in specs}
    assert len(set(said.values())) == len(specs)
    for spec, partition_spec in said.items():
        assert from_partition_spec(partition_spec, NAMES) == spec
        assert len(partition_spec) <= 2


def test_mesh_order_has_no_turns() -> None:
    assert from_partition_spec(P(("x", "z"), "y"), NAMES) == (0, 1, 0)
    assert from_partition_spec(P("y", ("z", "x")), NAMES) == (1 + TURN, 0, 1)
    assert turns_of((1, 2, 0)) == (0, 0, 1)
    assert turns_of((2, 1, 0)) == (0, 1, 2)
    assert format_spec((1 + TURN, SUM, 1), 2, NAMES) == "[-, z+x] sum(y)"


def test_texts_of_plans_keep_the_order() -> None:
    text = SpecText(CUBE)
    for spec in ordered_specs(2, 3):
        assert text.read(Record("here", "spec", text.write(spec))) == spec
    assert text.write((TURN, 1, 0)) == "z:0 y:1 x:0"
    assert text.write((0, 0, 0)) == "x:0 y:0 z:0"
    with pytest.raises(PlanFileError, match="names dim 256"):
        text.read(Record("here", "spec", "x:256"))


def test_reports_name_axes_in_the_order_of_a_group() -> None:
    names = GroupNames(8, CUBE)
    for axes in (("x",), ("z", "x"), ("y", "x", "z")):
        groups = CUBE.ordered_groups([NAMES.index(axis) for axis in axes])
        assert names.name("all_gather", groups) == ",".join(axes)
    odd = ((0, 1, 3, 2), (4, 5, 7, 6))
    assert names.name("all_gather", odd) == "y,z in the order (0, 1, 3, 2)"


def test_long_groups_that_no_axes_name_are_told_in_short() -> None:
    names = GroupNames(64, MeshShape(("x", "y"), (32, 2)))
    rows = tuple(tuple(range(j, j + 16)) for j in range(0, 64, 16))
    assert names.name("all_gather", rows) == "4 groups of 16, 1 apart"
    wide = [(*range(j, j + 32, 4),) for i in (0, 32) for j in range(i, i + 4)]
    assert names.name("all_gather", tuple(wide)) == "8 groups of 8, 4 apart"
    wide[0], wide[1] = (*wide[0][:-1], wide[1][-1]), (*wide[1][:-1], wide[0][-1])
    assert names.name("all_gather", tuple(wide)).startswith("{{0,4,8,12,16,20,24,29}")


def product_step(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def test_a_pinned_argument_lies_so_and_the_plan_file_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = {"w": "[-, y+x]", "^x$": P()}
    step = autopar.parallelize(product_step, mesh=MESH, pins=pins)
    compiled = run_as_planned(step, W, X)
    assert homes(compiled.plan)["w"] == (1 + TURN, 1)
    assert traffic(compiled.plan) == {}
    (out,) = jax.tree.leaves(compiled.compiled.output_shardings)
    assert out.spec == P(None, ("y", "x"))
    path = tmp_path / "plan.json"
    compiled.plan.save(path)
    assert '"spec": "y:1 x:1"' in path.read_text()
    loaded = autopar.Plan.load(path)
    assert loaded.sharding == compiled.plan.sharding
    run_as_planned(autopar.parallelize(product_step, plan=loaded), W, X)
    compiled.plan.explain()
    assert "[-, y+x]" in capsys.readouterr().out


def test_an_operator_has_the_axes_of_a_factor_in_one_order(tmp_path: Path) -> None:
    step = autopar.parallelize(
        lambda x: 2 * x, mesh=MESH, pins={"x": TURNED}, batch_argnums=()
    )
    path = tmp_path / "plan.json"
    step.plan(X).save(path)
    text = path.read_text()
    assert text.count("y:0 x:0") >= 4
    line = next(line for line in text.splitlines() if '"mul"' in line)
    path.write_text(text.replace(line, line.replace("y:0 x:0", "x:0 y:0", 1)))
    edited = autopar.parallelize(lambda x: 2 * x, plan=autopar.Plan.load(path))
    with pytest.raises(PlanFileError, match="in several orders"):
        edited.plan(X)


def test_an_array_that_lies_so_is_read_where_it_lies() -> None:
    x = jax.device_put(X, NamedSharding(MESH, TURNED))
    for pins in ({}, {"x": "placed"}):
        step = autopar.parallelize(jnp.sin, mesh=MESH, pins=pins)
        plan = run_as_planned(step, x).plan
        assert homes(plan)["x"] == (TURN, 0)
        assert traffic(plan) == {}


def test_state_in_another_order_is_updated_in_it() -> None:
    def update(state: Any, x: jax.Array) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * gradient}

    step = autopar.parallelize(update, mesh=MESH, pins={"w": P(None, ("y", "x"))})
    compiled = run_as_planned(step, {"w": W}, X)
    assert not any(kind == "collective_permute" for kind, _ in traffic(compiled.plan))
    (out,) = jax.tree.leaves(compiled.compiled.output_shardings)
    assert out.spec == P(None, ("y", "x"))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: autopar.pin(x, TURNED),
        lambda x: autopar.relayout(x, TURNED),
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, TURNED)),
        lambda x: jax.shard_map(
            jnp.sin, mesh=MESH, in_specs=TURNED, out_specs=TURNED, check_vma=False
        )(x),
    ],
    ids=["pin", "relayout", "sharding_constraint", "shard_map"],
)
def test_what_a_step_asks_for_is_one_permutation_away(change: Any) -> None:
    step = autopar.parallelize(
        lambda x: change(x), mesh=MESH, pins={"x": P(("x", "y"))}, batch_argnums=()
    )
    compiled = run_as_planned(step, X)
    assert traffic(compiled.plan) == {("collective_permute", "x,y"): [X.nbytes // 8]}
    (out,) = jax.tree.leaves(compiled.compiled.output_shardings)
    assert out.spec == TURNED


def test_layers_of_a_scan_keep_the_order() -> None:
    def step(layers: jax.Array, x: jax.Array) -> Any:
        def loss(layers: jax.Array) -> jax.Array:
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
            return jnp.mean(out**2)

        return layers - 0.1 * jax.grad(loss)(layers)

    layers = random(1, 3, 8, 8, scale=0.3)
    parallel = autopar.parallelize(
        step, mesh=MESH, pins={"layers": P(None, None, ("y", "x"))}
    )
    plan = run_as_planned(parallel, layers, X).plan
    assert homes(plan)["layers"] == (2 + TURN, 2)
    assert not any(kind == "collective_permute" for kind, _ in traffic(plan))


def test_microbatches_and_stages_keep_the_order() -> None:
    """Of two kernels that a step updates, each in a stage of its own."""

    def update(state: Any, x: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ state["a"]) @ state["b"]) ** 2)

        grads = jax.grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    state = {"a": W, "b": random(2, 8, 8)}
    pins = {"'a'|'b'": P(("y", "x"))}
    method = autopar.ShardParallel(num_microbatches=2)
    step = autopar.parallelize(update, mesh="x:2;y:4", pins=pins, method=method)
    run_as_planned(step, state, X)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(update, mesh="x:2;y:2", pins=pins, method=method)
    programs = run_pipeline_as_planned(step, state, X).lowered.step.pipeline.lowered
    specs = {
        each.path: each.spec for one in programs for each in one.planned.plan.inputs
    }
    assert specs["state['a']"] == specs["state['b']"] == (TURN, 0)
