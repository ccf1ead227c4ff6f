"""Which meshes are tried where none is given, which one wins, and what is left."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.clusters.cluster import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.planner.intra_op import IntraOpSolution, plan_intra_op
from autopar.planner.mesh_search import (
    MOST_SEARCHED,
    NO_LIMITS,
    MeshSearch,
    SearchLimits,
    least_seconds,
)
from autopar.planner.mesh_shapes import (
    default_mesh,
    is_refined_by,
    mesh_shapes,
    neighbours,
)
from autopar.planner.questions import Questions
from autopar.sharding.mesh import MeshShape
from tests.marks import slow
from tests.priced_shapes import Planner
from tests.rows.fixtures import Case
from tests.rows.named_plans import graph_of


def sizes_of(cluster: str) -> list[tuple[int, ...]]:
    return [mesh.axis_sizes for mesh in mesh_shapes(Cluster.preset(cluster))]


@pytest.mark.parametrize(
    ("cluster", "sizes"),
    [
        ("1xH100", [(1,)]),
        ("7xH100", [(7,)]),
        ("8xH100", [(8,), (4, 2), (2, 2, 2)]),
        ("6xH100", [(6,), (3, 2)]),
        ("1x12xH100", [(12,), (4, 3), (6, 2), (3, 2, 2)]),
        ("2x4xA100", [(8,), (2, 4), (4, 2), (2, 2, 2)]),
    ],
)
def test_shapes_follow_the_levels_and_symmetric_ones_come_once(
    cluster: str, sizes: list[tuple[int, ...]]
) -> None:
    assert sizes_of(cluster) == sizes


def test_no_cut_splits_hosts_unevenly() -> None:
    for mesh in mesh_shapes(Cluster.preset("3x8xH100")):
        runs = np.cumprod(mesh.axis_sizes[::-1])
        assert all(8 % run == 0 or run % 8 == 0 for run in runs)


def test_every_shape_holds_every_device_and_its_axes_are_x_y_z() -> None:
    for mesh in mesh_shapes(Cluster.preset("8x8xH100")):
        assert mesh.size == 64
        assert mesh.axis_names == ("x", "y", "z")[: mesh.num_axes]


def test_every_shape_is_reached_from_one_axis() -> None:
    cluster = Cluster.preset("4x8xH100")
    reached, waiting = set(), [mesh_shapes(cluster)[0]]
    while waiting:
        mesh = waiting.pop()
        if mesh not in reached:
            reached.add(mesh)
            waiting += neighbours(mesh, cluster)
    assert reached == set(mesh_shapes(cluster))


def test_an_axis_of_odd_parts_is_cut_too() -> None:
    """4 x 3 devices of a host become 2 x 2 x 3, which is searched as 3 x 2 x 2."""
    cluster = Cluster.preset("1x12xH100")
    near = [
        each.axis_sizes for each in neighbours(MeshShape(("x", "y"), (4, 3)), cluster)
    ]
    assert (3, 2, 2) in near and (2, 2, 3) not in near


def test_the_default_has_an_axis_for_each_level() -> None:
    assert default_mesh(Cluster.preset("8xH100")).axis_sizes == (8,)
    assert default_mesh(Cluster.preset("4x8xH100")).axis_sizes == (4, 8)
    assert default_mesh(Cluster.preset("4x1xH100")).axis_sizes == (4,)


def test_a_shape_is_refined_by_its_cuts_and_more() -> None:
    whole, pair, three = (
        MeshShape(("x", "y", "z")[: len(sizes)], sizes)
        for sizes in ((8,), (4, 2), (2, 2, 2))
    )
    assert is_refined_by(whole, three) and is_refined_by(pair, three)
    assert is_refined_by(pair, pair) and not is_refined_by(three, pair)


CLUSTER = Cluster.preset("8x8xH100")


def searched(
    planner: Planner, limits: SearchLimits = NO_LIMITS
) -> tuple[IntraOpSolution, MeshSearch]:
    search = MeshSearch(CLUSTER, mesh_shapes(CLUSTER), limits)
    meshes = Questions(search.best())
    while meshes.asked is not None:
        try:
            answer = planner(*meshes.asked)
        except InfeasiblePlanError as error:
            answer = error
        meshes.answer(answer)
    return meshes.result, search


def test_the_search_climbs_to_a_shape_of_three_axes_and_solves_it_tightly() -> None:
    planner = Planner({(64,): 5.0, (8, 8): 4.0, (16, 4): 3.0, (16, 2, 2): 2.0})
    found, search = searched(planner)
    assert found.plan.mesh.axis_sizes == (16, 2, 2)
    assert planner.asked[0] == ((64,), 1e-4)
    assert planner.asked[-1] == ((16, 2, 2), 1e-4)
    assert "14 aligned shapes; tried x:64 5 s" in str(search)


def test_equal_shapes_leave_the_simplest() -> None:
    planner = Planner({}, other=1.0)
    found, search = searched(planner)
    assert found.plan.mesh.axis_sizes == (64,)
    assert planner.shapes_asked.count((64,)) == 1


def test_a_gain_too_small_is_not_worth_an_axis() -> None:
    found, _ = searched(Planner({(8, 8): 0.999}, other=1.0))
    assert found.plan.mesh.axis_sizes == (64,)


def test_at_the_floor_nothing_else_is_solved() -> None:
    planner = Planner({(64,): 1.001})
    searched(planner, limits=SearchLimits(floor_seconds=1.0))
    assert planner.shapes_asked == [(64,)]


def test_near_the_floor_one_cut_is_tried() -> None:
    planner = Planner({}, other=1.1)
    searched(planner, limits=SearchLimits(floor_seconds=1.0))
    assert planner.shapes_asked == [(64,), (8, 8)]


def test_a_shape_is_solved_only_until_it_cannot_be_better() -> None:
    planner = Planner({(64,): 4.0, (8, 8): 3.0}, other=5.0)
    found, search = searched(planner)
    assert found.plan.mesh.axis_sizes == (8, 8)
    first, second, *others, last = planner.cutoffs
    assert first == last == np.inf and second == pytest.approx(4.0 * 0.995)
    assert others == pytest.approx([3.0 * 0.995] * len(others)) and others
    assert "x:8;y:8 3 s" in str(search) and "x:16;y:4 over 5 s" in str(search)


def test_shapes_on_the_way_to_one_below_the_cutoff_may_be_above_it() -> None:
    planner = Planner({(64,): 5.0, (8, 8): 4.0, (16, 4): 3.0, (16, 2, 2): 2.0})
    found, search = searched(planner, limits=SearchLimits(cutoff=2.5))
    assert found.plan.mesh.axis_sizes == (16, 2, 2)
    assert "x:64 over 5 s" in str(search) and "x:16;y:4 over 3 s" in str(search)


def test_a_shape_a_little_below_the_cutoff_is_taken() -> None:
    planner = Planner({(8, 8): 3.999}, other=4.001)
    found, search = searched(planner, limits=SearchLimits(cutoff=4.0))
    assert found.plan.mesh.axis_sizes == (8, 8)


def test_where_no_shape_is_below_the_cutoff_each_is_ruled_out() -> None:
    planner = Planner({(64,): 5.0, (8, 8): 4.0}, other=6.0)
    found, search = searched(planner, limits=SearchLimits(cutoff=1.0))
    assert found.plan.predicted.step_seconds >= 1.0
    assert all(trial.is_ended for trial in search.trials.values())
    assert set(planner.cutoffs) == {1.0}


@pytest.mark.parametrize("is_long", [False, True])
def test_three_axes_of_a_long_step_keep_the_loose_gap(is_long: bool) -> None:
    planner = Planner({(64,): 5.0, (8, 8): 4.0, (16, 4): 3.0, (16, 2, 2): 2.0})
    found, search = searched(planner, limits=SearchLimits(is_long=is_long))
    assert found.plan.mesh.axis_sizes == (16, 2, 2)
    assert (planner.asked[-1] == ((16, 2, 2), 1e-4)) != is_long
    two = Planner({(64,): 5.0, (8, 8): 4.0}, other=9.0)
    searched(two, limits=SearchLimits(is_long=is_long))
    assert two.asked[-1] == ((8, 8), 1e-4)


def test_a_bound_of_a_finer_shape_rules_out_the_coarser_ones() -> None:
    # (4, 4, 4) is solved before (4, 16), and is it with the last axis cut.
    costs = {(64,): 5.0, (8, 8): 4.0, (16, 4): 3.0, (4, 4, 4): 2.0}
    planner = Planner(costs)
    assert searched(planner)[0].plan.mesh.num_axes == 3
    assert (4, 16) not in planner.shapes_asked
    loose = Planner({**costs, (4, 16): 1.0}, looseness=1.5)
    found = searched(loose)[0].plan.mesh
    assert found.axis_sizes == (4, 4, 4)  # no neighbour of it has two axes


def test_what_does_not_fit_on_one_axis_is_looked_for_on_more() -> None:
    planner = Planner({(4, 2, 8): 7.0, (8, 4, 2): 6.0, (4, 4, 4): 5.0}, other=np.inf)
    found, search = searched(planner)
    assert found.plan.mesh.num_axes == 3
    assert "tried x:64 does not fit, x:8;y:8 does not fit, x:4;y:2;z:8 7 s" in str(
        search
    )


def test_nothing_fits_gives_the_least_budget_of_all() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        searched(Planner({}, other=np.inf))
    assert caught.value.least_budget_bytes == 30


def test_where_cutting_does_not_help_no_finer_shape_is_solved() -> None:
    planner = Planner({}, other=np.inf, needs=(60, 60, 60))
    with pytest.raises(InfeasiblePlanError):
        searched(planner)
    assert planner.shapes_asked == [(64,), (8, 8)]


def test_few_shapes_are_searched_for_plans_within_a_budget() -> None:
    """The best of them is kept, though another cut might pay."""
    costs = {(64,): 5.0, (8, 8): 4.0, (16, 4): 3.0, (16, 2, 2): 2.0}
    planner = Planner(costs, is_searched=True)
    found, search = searched(planner)
    assert len(planner.asked) == len(search.trials.values()) == MOST_SEARCHED
    seconds = [trial.seconds for trial in search.trials.values()]
    assert found.plan.predicted.step_seconds == min(seconds)


@pytest.mark.parametrize("shape", [(8,), (4, 2), slow((2, 2, 2))])
def test_no_plan_goes_below_the_floor(shape: tuple[int, ...]) -> None:
    cluster = Cluster.preset("8xA100")

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    graph = graph_of(Case(step, (jnp.ones((64, 128)), jnp.ones((256, 64)))))
    mesh = MeshShape(("x", "y", "z")[: len(shape)], shape)
    plan = plan_intra_op(graph, mesh, cluster).plan
    assert 0 < least_seconds(graph, cluster) <= plan.predicted.step_seconds


def test_a_finer_mesh_is_found_where_one_axis_does_not_divide(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x @ y)

    kind = jax.ShapeDtypeStruct((4 * 3, 1 << 13), jnp.float32)
    other = jax.ShapeDtypeStruct((1 << 13, 2 * 5), jnp.float32)
    cluster = Cluster.preset("8xH100")
    with caplog.at_level(logging.INFO, "autopar"):
        plan = autopar.parallelize(product, cluster=cluster).plan(kind, other)
    one_axis = autopar.parallelize(product, cluster=cluster, mesh="x:8")
    assert plan.sharding.mesh.num_axes > 1
    predicted = one_axis.plan(kind, other).predicted
    assert plan.predicted.step_seconds < predicted.step_seconds
    lines = [r.message for r in caplog.records if "aligned shapes" in r.message]
    line, *_ = lines  # others are of the step with padded examples
    assert "of 3 aligned shapes; tried x:8" in line and "x:4;y:2" in line


def test_a_searched_mesh_runs_and_is_the_same_each_time() -> None:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(x @ y)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(12, 256)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(256, 10)), jnp.float32)
    step = autopar.parallelize(product)
    np.testing.assert_allclose(step(x, y), product(x, y), rtol=2e-5, atol=2e-5)
    again = autopar.parallelize(product).plan(x, y)
    assert step.plan(x, y).sharding == again.sharding


def meshes_tried(caplog: pytest.LogCaptureFixture) -> bool:
    return any("aligned shapes" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "a:4;b:2"},
        {"pins": {"x": PartitionSpec("x")}},
    ],
    ids=str,
)
def test_what_the_user_names_is_not_searched(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    with caplog.at_level(logging.INFO, "autopar"):
        autopar.parallelize(double, **options).plan(jnp.ones((8, 8)))
    assert not meshes_tried(caplog)


def test_a_pin_in_the_step_keeps_the_default_mesh(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def double(x: jax.Array) -> jax.Array:
        return 2 * autopar.pin(x, PartitionSpec("x"))

    with caplog.at_level(logging.INFO, "autopar"):
        plan = autopar.parallelize(double).plan(jnp.ones((8, 8)))
    assert plan.sharding.mesh.axis_sizes == (8,)
    assert not meshes_tried(caplog)


def test_arguments_split_on_a_mesh_keep_it(mesh_2d: Mesh) -> None:
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    split = NamedSharding(mesh_2d, PartitionSpec("y"))
    whole = NamedSharding(mesh_2d, PartitionSpec())
    ones = jnp.ones((8, 8))
    step = autopar.parallelize(double)
    assert str(step.plan(jax.device_put(ones, split)).sharding.mesh) == "x:2;y:4"
    other = autopar.parallelize(double).plan(jax.device_put(ones, whole))
    assert other.sharding.mesh.axis_names == ("x",)
