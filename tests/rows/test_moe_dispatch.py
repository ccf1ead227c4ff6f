"""Experts whose tokens are moved by index, on the devices that hold the experts."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.steps.parallel_plan import Plan
from tests.rows.fixtures import Params
from tests.rows.moe_dispatch import (
    Layer,
    by_scatter,
    by_sorting,
    step_of,
    training,
)
from tests.rows.moe_models import Experts, looped
from tests.rows.running import (
    all_reduce_bytes,
    homes,
    run_as_planned,
    sent_bytes,
    traffic,
)

SMALL = Experts(groups=1, tokens=32, width=16, experts=8, capacity=4, hidden=24)
LAYERS = {"add": by_scatter("add"), "set": by_scatter("set"), "sort": by_sorting}
EXPERTS = r"\['up'\]|\['down'\]"
TOKENS = r"\['x'\]|\['y'\]"


def devices(**sizes: int) -> Mesh:
    chosen = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(chosen.reshape(tuple(sizes.values())), tuple(sizes))


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_tokens_are_dropped_as_by_a_loop_over_them(name: str, top: int) -> None:
    """Those over the capacity; sorting drops none."""
    kept = SMALL.tokens * top if name == "sort" else SMALL.capacity
    layer = replace(SMALL, top=top, capacity=kept)
    params, x = layer.params(), layer.batch()["x"]
    expected, _, weights = looped(layer, params, np.asarray(x))

    def apply(params: Params, x: jax.Array) -> jax.Array:
        return LAYERS[name](layer, params, x)

    pins = {EXPERTS: P("n"), "^x$": P(None, "n")}
    y = autopar.parallelize(apply, mesh=devices(n=8), pins=pins)(params, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    is_dropped = (weights > 0).sum((2, 3)) < top
    assert is_dropped.any() == (name != "sort")


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", ["add", "set"])
def test_buffers_of_experts_train_as_on_one_device(name: str, groups: int) -> None:
    """Weights stay where they are: nothing that is sent is as large as they are."""
    layer = replace(SMALL, groups=groups, hidden=64)
    case = training(layer, LAYERS[name])
    spec = P("x", "y") if groups > 1 else P(None, ("x", "y"))
    pins = {EXPERTS: P("y"), TOKENS: spec}
    mesh = devices(x=2 if groups > 1 else 1, y=4)
    step = autopar.parallelize(case.step, mesh=mesh, pins=pins)
    plan = run_as_planned(step, *case.args).plan
    by_experts = [
        op.factors[-1] == "b0"
        for op in plan.sharding.operators
        if op.kind == "dot_general" and "(ec" in op.name
    ]
    assert by_experts == [True] * 6
    assert not gathers_weights(plan, case.args[0])


def gathers_weights(plan: Plan, params: Params) -> bool:
    """Whether all of the weights of some expert layer come together anywhere."""
    least = min(params[name].nbytes for name in ("up", "down"))
    gathered = [
        size
        for (kind, _), sizes in traffic(plan).items()
        for size in sizes
        if kind == "all_gather"
    ]
    return any(size >= least for size in gathered)


@pytest.mark.parametrize("sizes", [{"n": 8}, {"x": 2, "n": 4}], ids=str)
def test_sorted_rows_go_to_the_devices_of_their_groups(sizes: dict[str, int]) -> None:
    """Features are odd, so that there is nothing else to split experts by."""
    layer = replace(SMALL, top=1, width=27, hidden=45)
    case = training(layer, by_sorting)
    pins = {EXPERTS: P("n"), TOKENS: P(None, tuple(sizes))}
    step = autopar.parallelize(case.step, mesh=devices(**sizes), pins=pins)
    plan = run_as_planned(step, *case.args).plan
    ragged = [o for o in plan.sharding.operators if o.kind == "ragged_dot_general"]
    assert [op.factors[-1] for op in ragged] == ["groups"] * 6
    assert not gathers_weights(plan, case.args[0])


LARGE = Experts(
    groups=1, tokens=8192, width=1024, experts=16, capacity=2048, hidden=4096
)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize(("name", "number"), [("add", 3), ("set", 4)])
def test_the_solver_splits_experts_and_exchanges_buffers(
    name: str, number: int, groups: int
) -> None:
    """Unprompted: a device sends its part of the buffers to those that hold experts,
    and back, and the same for gradients; weights are not sent. Tokens that every device
    is given are added to the buffers of its own experts without being sent."""
    layer = replace(LARGE, groups=groups, tokens=8192 // groups)
    layer = replace(layer, capacity=2 * layer.tokens * layer.top // layer.experts)
    plan = planned(layer, LAYERS[name])
    assert homes(plan)["params['up']"] == homes(plan)["params['down']"] == (0,)
    buffer_bytes = layer.experts * groups * layer.capacity * layer.width * 4
    found = traffic(plan)
    assert found.pop(("all_to_all", "n")) == [buffer_bytes // 8] * number
    assert sum(sum(sizes) for sizes in found.values()) < buffer_bytes // 100


def test_the_solver_splits_every_expert_where_rows_are_sorted() -> None:
    """Unprompted: what is sent is tokens and what is added to them, no weights. Rows
    are as many as one expert may get, so they come to all devices; then every device
    does its share of each expert, whichever experts tokens go to."""
    plan = planned(LARGE, by_sorting)
    types, _ = LARGE.types()
    for name in ("up", "down"):
        path = f"params[{name!r}]"
        held = next(each for each in plan.sharding.inputs if each.path == path)
        assert held.bytes * 8 == types[name].size * 4
    tokens = LARGE.tokens * LARGE.width * 4
    assert sent_bytes(plan) <= 4 * all_reduce_bytes(tokens, 8) / 2 * 1.05


def planned(layer: Experts, apply: Layer) -> Plan:
    cluster = autopar.Cluster.preset("8xH100")
    step = autopar.parallelize(step_of(layer, apply), mesh="n:8", cluster=cluster)
    return step.plan(*layer.types())
