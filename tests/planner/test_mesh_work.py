"""Which meshes are searched where memory binds, and for how long."""

import weakref
from typing import Any

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.planner.intra_op import IntraOpSolution
from autopar.planner.mesh_search import ShapePlanner, search_meshes
from autopar.planner.search_work import SearchWork
from autopar.sharding.mesh import MeshShape
from tests.priced_shapes import Planner

CLUSTER = Cluster.preset("8x8xH100")


class Searching(Planner):
    """Each shape takes all the work that it may."""

    work: SearchWork

    def __call__(self, mesh: MeshShape, gap: float, cutoff: float) -> IntraOpSolution:
        own = self.work.half()
        own.clock.spend(own.left)
        return super().__call__(mesh, gap, cutoff)


def test_where_little_work_is_left_no_other_shape_is_begun() -> None:
    planner = Searching({(64,): 5.0, (8, 8): 4.0, (16, 4): 3.0})
    planner.work = SearchWork(8.0)
    found = search_meshes(CLUSTER, ShapePlanner(planner), work=planner.work)
    assert planner.shapes_asked[:2] == [(64,), (8, 8)]
    assert set(planner.shapes_asked) == {(64,), (8, 8)}
    assert found.solution.plan.mesh.axis_sizes == (8, 8)


def test_a_long_step_may_take_all_work_on_a_mesh_of_several_axes() -> None:
    work = SearchWork(8.0)
    line, cut = MeshShape(("x",), (64,)), MeshShape(("x", "y"), (8, 8))
    assert work.of_mesh(cut, True) is work
    for mesh, is_long in ((line, True), (line, False), (cut, False)):
        assert work.of_mesh(mesh, is_long).most == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(("part", "others"), [(0.9, True), (1.0, False)])
def test_after_a_cut_shape_that_took_its_half_no_other_is_begun(
    part: float, others: bool
) -> None:
    work = SearchWork(8.0)
    planner = Planner({(8, 8): 4.0}, other=6.0)

    def plan_on(mesh: MeshShape, gap: float, cutoff: float) -> IntraOpSolution:
        work.clock.spend(part * work.half().left)
        return planner(mesh, gap, cutoff)

    search_meshes(CLUSTER, ShapePlanner(plan_on, binds_on=lambda mesh: True), work=work)
    assert planner.shapes_asked[0] == (8, 8)
    assert (len(planner.shapes_asked) > 1) == others


def test_where_memory_binds_the_levels_come_before_the_one_axis() -> None:
    asked: list[MeshShape] = []

    def binds_on(mesh: MeshShape) -> bool:
        asked.append(mesh)
        return True

    planner = Planner({(64,): 5.0, (8, 8): 4.0}, other=6.0)
    found = search_meshes(CLUSTER, ShapePlanner(planner, binds_on=binds_on))
    assert [mesh.axis_sizes for mesh in asked] == [(64,)]
    assert planner.shapes_asked[0] == (8, 8) and (64,) not in planner.shapes_asked
    assert found.solution.plan.mesh.axis_sizes == (8, 8)
    one_host = Planner({(8,): 1.0})
    search_meshes(Cluster.preset("8xH100"), ShapePlanner(one_host, binds_on=binds_on))
    assert one_host.shapes_asked[0] == (8,)


@pytest.mark.parametrize("binds", [False, True])
def test_finer_shapes_are_tried_where_levels_help_whatever_comes_first(
    binds: bool,
) -> None:
    planner = Planner({(4, 2, 8): 7.0}, other=np.inf)
    found = search_meshes(CLUSTER, ShapePlanner(planner, binds_on=lambda mesh: binds))
    assert found.solution.plan.mesh.axis_sizes == (4, 2, 8)
    first = [(64,), (8, 8)]
    assert planner.shapes_asked[:2] == (first[::-1] if binds else first)


@pytest.mark.parametrize("searches", [False, True])
def test_where_memory_binds_a_gain_within_its_gap_is_not_worth_another_shape(
    searches: bool,
) -> None:
    planner = (Searching if searches else Planner)({(64,): 1.0}, other=0.993)
    work = SearchWork(64.0)
    planner.work = work  # pyright: ignore[reportAttributeAccessIssue]
    found = search_meshes(CLUSTER, ShapePlanner(planner), work=work)
    sizes = found.solution.plan.mesh.axis_sizes
    assert sizes == ((64,) if searches else (8, 8))
    again = planner.shapes_asked.count(sizes) == 2  # with a tight gap
    assert again == (not searches)


def test_no_search_is_begun_that_would_end_with_its_problem() -> None:
    work = SearchWork(1.0)
    assert work.may_begin(2000)
    work.spend_on_problem(2000)
    assert work.left == pytest.approx(0.4)
    assert work.may_begin(1000) and not work.may_begin(2000)


def test_shapes_are_searched_on_as_long_as_nothing_fits() -> None:
    planner = Searching({(4, 2, 8): 7.0}, other=np.inf)
    planner.work = SearchWork(0.0)
    found = search_meshes(CLUSTER, ShapePlanner(planner), work=planner.work)
    assert found.solution.plan.mesh.axis_sizes == (4, 2, 8)


class Problem:
    pass


def test_what_was_searched_on_a_shape_is_not_held_by_its_error() -> None:
    held: list[weakref.ref[Any]] = []
    planner = Planner({}, other=np.inf)

    def plan_on(mesh: MeshShape, gap: float, cutoff: float) -> IntraOpSolution:
        assert all(each() is None for each in held)
        problem = Problem()
        held.append(weakref.ref(problem))
        return planner(mesh, gap, cutoff)

    with pytest.raises(InfeasiblePlanError):
        search_meshes(CLUSTER, ShapePlanner(plan_on))
    assert len(held) > 1
