"""Rows of GPipe that a step of stages shows: synchronous updates, one send a border."""

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import autopar
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.methods.methods import PipelineParallel
from autopar.pipelines.layers import NEAR, ForwardOrder, stage_borders
from autopar.pipelines.stage_cut import forward_order
from autopar.planner.whole_step import roles_of
from autopar.runtime.instructions import Send
from tests.rows.fixtures import f6
from tests.rows.running import run_pipeline_as_planned


def slowest_of_best(costs: Sequence[float], num_cells: int) -> float:
    """The slowest cell of the best of all contiguous partitions."""
    return min(
        max(sum(costs[i:j]) for i, j in pairwise([0, *cut, len(costs)]))
        for cut in combinations(range(1, len(costs)), num_cells - 1)
    )


@functools.cache
def layers_of_f6() -> ForwardOrder:
    case = f6()
    traced = trace(case.step, case.args, {})
    graph = build_graph(traced, roles_of(traced))
    return forward_order(graph, [i.tensor for i in graph.inputs[:8]])


@given(st.lists(st.floats(0, 10.0), min_size=8, max_size=8), st.integers(2, 8))
def test_gpi_1_given_costs_are_balanced_as_well_as_can_be(
    costs: list[float], num_cells: int
) -> None:
    assume(sum(costs) > 0)
    products = layers_of_f6().balanced(num_cells, costs)
    assert len(products) == num_cells and min(products) > 0 and sum(products) == 8
    borders = [0, *accumulate(products)]
    slowest = max(sum(costs[i:j]) for i, j in pairwise(borders))
    assert slowest == pytest.approx(slowest_of_best(costs, num_cells))


def test_gpi_1_a_user_gives_the_costs_of_layers() -> None:
    """The most even of the best cuts; without costs, each cell is two layers."""
    case = f6()
    costs = (7, 1, 2, 2, 1, 1, 5, 6)
    method = PipelineParallel(4, 2, layer_costs=costs)
    step = autopar.parallelize(case.step, method=method)
    plan = run_pipeline_as_planned(step, *case.args).plan
    assert plan.stages.stage_products == (1, 4, 2, 1)
    again: Any = autopar.parallelize(case.step, plan=plan, method=method)
    assert again.plan(*case.args).stages.stage_products == (1, 4, 2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_costs": [1.0] * 7}, "forward pass, 8, .* got 7"),
        ({"layer_costs": [0.0] * 8}, "not all 0"),
        ({"layer_costs": [1.0] * 8, "stage_products": [4, 4]}, "leave one out"),
    ],
)
def test_gpi_1_costs_that_say_nothing_are_refused(options: Any, message: str) -> None:
    case = f6()
    with pytest.raises(ValueError, match=message):
        method = PipelineParallel(2, 2, **options)
        autopar.parallelize(case.step, method=method).plan(*case.args)


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12), st.integers(2, 4))
def test_gpi_1_cells_are_as_even_as_any_contiguous_partition(
    costs: list[float], num_cells: int
) -> None:
    """Where every border moves as many bytes, the slowest cell is the least possible,
    but for the part that evens out nothing: `NEAR` of an even share."""
    borders = stage_borders(costs, [1.0] * len(costs), num_cells)
    cells = [sum(costs[i:j]) for i, j in pairwise([0, *borders, len(costs)])]
    best = slowest_of_best(costs, num_cells)
    allowed = max(best, sum(costs) / num_cells * (1 + NEAR))
    assert best * (1 - 1e-9) <= max(cells) <= allowed * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(2, 1), (2, 8), (4, 2), (4, 8)]
)
def test_gpi_2_the_update_is_that_of_one_stage_and_one_microbatch(
    num_stages: int, num_microbatches: int
) -> None:
    """New parameters are old ones less the gradients: K = 1, M = 1 is plain `jit`."""
    case = f6()
    method = PipelineParallel(num_stages, num_microbatches)
    run_pipeline_as_planned(autopar.parallelize(case.step, method=method), *case.args)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gpi_2_one_send_of_1024_bytes_a_microbatch_boundary_and_direction(
    schedule: str,
) -> None:
    case = f6()
    method = PipelineParallel(4, 8, schedule)
    step = autopar.parallelize(case.step, method=method)
    lowered: Any = step.lower(*case.args)
    planned = {(t.source, t.target): t for t in lowered.plan.stages.transfers}
    assert len(planned) == len(lowered.plan.stages.transfers)
    sends = Counter(
        (each.source, each.target, each.value.microbatch)
        for list_ in lowered.step.execute.instructions
        for each in list_.instructions
        if isinstance(each, Send)
    )
    borders = [(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)]
    assert planned.keys() == set(borders)
    assert {(t.bytes, t.count) for t in planned.values()} == {(1_024, 8)}
    assert sends == Counter({(*pair, m): 1 for pair in borders for m in range(8)})
    assert lowered.plan.stages.transfer_bytes == 6 * 8 * 1_024


def test_gpi_5_stages_combine_with_data_and_tensor_parallelism() -> None:
    """Two stages of 2 x 2 devices: rows over data, kernels by column and row."""
    case = f6()
    columns_and_rows = (P(None, "tensor"), P("tensor"))
    pins = {f"layers[{i}]": columns_and_rows[i % 2] for i in range(8)}
    pins |= {"x": P("data"), "y": P("data")}
    step = autopar.parallelize(
        case.step, method=PipelineParallel(2, 4), mesh="data:2;tensor:2", pins=pins
    )
    plan = run_pipeline_as_planned(step, *case.args).plan
    for each in plan.stages.programs:
        homes = {i.path: i.spec for i in each.sharding.inputs}
        for i in range(8):
            wanted = (-1, (i + 1) % 2)  # dim 1 of even layers, dim 0 of odd ones
            assert homes.get(f"layers[{i}]", wanted) == wanted
