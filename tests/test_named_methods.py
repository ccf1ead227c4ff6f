"""Named methods are the solver with less choice, which leaves textbook traffic.

Closed forms: data parallelism and ZeRO send 2 (n-1)/n elements a parameter, Megatron 8
bsh (t-1)/t elements a layer.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import FallbackWarning
from autopar.methods.named_methods import NamedMethod
from autopar.steps.parallel_plan import Plan
from benchmarks.models import build
from tests.marks import slow
from tests.rows.fixtures import BSH_BYTES, Case, f1, f3, mixture_of_experts, random
from tests.rows.running import (
    all_reduce_bytes,
    homes,
    run_as_planned,
    sent_bytes,
    traffic,
)
from tests.rows.test_fairscale import f2

ADAM = optax.adam(1e-2, eps=1e-3)
PARAMETERS = f2(ADAM).args[0][0]
PSI_BYTES = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMETERS))
LOSS_BYTES = all_reduce_bytes(4, 8)


def devices(number: int) -> Mesh:
    return Mesh(jax.devices()[:number], ("x",))


def run(case: Case, method: NamedMethod, mesh: Any = "x:8") -> Plan:
    """The plan of a method, which runs as planned."""
    step = autopar.parallelize(case.step, mesh=mesh, method=method)
    return run_as_planned(step, *case.args).plan


def planned(case: Case, method: NamedMethod, mesh: Any = "x:8") -> Plan:
    return autopar.parallelize(case.step, mesh=mesh, method=method).plan(*case.args)


@pytest.mark.parametrize("mesh", ["x:8", "x:2;y:4"])
def test_data_parallel_sums_each_gradient_once(mesh: str) -> None:
    made = run if mesh == "x:8" else planned
    plan = made(f1(), autopar.DataParallel(), mesh)
    axes = "x" if mesh == "x:8" else "x,y"
    assert traffic(plan) == {("all_reduce", axes): [262_144] * 2}
    whole, rows = ((-1,), (0,)) if mesh == "x:8" else ((-1, -1), (0, 0))
    assert homes(plan) == {
        "params['v']": whole,
        "params['w']": whole,
        "x": rows,
        "y": rows,
    }


def test_data_parallel_of_adam_keeps_its_moments_whole() -> None:
    case = f2(ADAM)
    plan = planned(case, autopar.DataParallel())
    assert sent_bytes(plan) == 2 * PSI_BYTES * 7 / 8 + LOSS_BYTES
    assert plan.sharding.state_bytes() == 3 * PSI_BYTES + 4


def test_data_parallel_of_a_transformer_layer() -> None:
    """F3 has two examples; its input, returned as a gradient, is one of them."""
    case = f3()
    plan = planned(case, autopar.DataParallel(), devices(2))
    params = sorted((p.nbytes for p in jax.tree.leaves(case.args[0])), reverse=True)
    assert traffic(plan) == {("all_reduce", "x"): params}
    assert homes(plan)["x"] == (0,)


def test_data_parallel_of_experts() -> None:
    """F4: the groups of tokens are the batch."""
    case = mixture_of_experts()
    plan = planned(case, autopar.DataParallel())
    params = sorted((p.nbytes for p in jax.tree.leaves(case.args[0])), reverse=True)
    assert traffic(plan) == {("all_reduce", "x"): [*params, 4]}


def test_data_parallel_gathers_where_examples_are_compared() -> None:
    """Similarities have the batch twice, and a sort must see all of it."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            z = jnp.tanh(x @ w)
            similar = jnp.diag(jax.nn.log_softmax(z @ z.T)).mean()
            return jnp.sort(z, axis=0)[0].sum() - similar

        return w - 0.1 * jax.grad(loss)(w)

    case = Case(step, (random(0, 16, 8, scale=0.3), random(1, 32, 16)))
    plan = planned(case, autopar.DataParallel())
    assert homes(plan) == {"w": (-1,), "x": (0,)}
    assert ("all_gather", "x") in traffic(plan)


STATE_BYTES = {
    1: PSI_BYTES + 2 * PSI_BYTES // 8,
    2: PSI_BYTES + 2 * PSI_BYTES // 8,
    3: 3 * PSI_BYTES // 8,
}


@pytest.mark.parametrize("stage", STATE_BYTES)
def test_zero_scatters_gradients_and_gathers_parameters(stage: int) -> None:
    """F2: 4 reduce_scatters of 32,768 B and 4 all_gathers of 262,144 B. Stage 3 gathers
    before the forward pass and keeps what it gathered, if it is told to, the others
    after the update."""
    made = planned if stage == 2 else run  # it is the plan of stage 1
    plan = made(f2(ADAM), autopar.Zero(stage, reshard_after_forward=stage < 3))
    assert traffic(plan) == {
        ("reduce_scatter", "x"): [32_768] * 4,
        ("all_gather", "x"): [262_144] * 4,
        ("all_reduce", "x"): [4],
    }
    assert sent_bytes(plan) == 1_835_008 + LOSS_BYTES
    assert plan.sharding.state_bytes() == STATE_BYTES[stage] + 4  # and Adam's count


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("make", [f1, f3])
def test_zero_of_plain_descent_sends_as_much(make: Any, stage: int) -> None:
    case = make()
    number = 8 if make is f1 else 2
    method = autopar.Zero(stage, reshard_after_forward=stage < 3)
    plan = run(case, method, devices(number))
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(case.args[0]))
    assert sent_bytes(plan) == all_reduce_bytes(params, number)


def test_zero_on_two_axes_splits_over_both() -> None:
    method = autopar.Zero(3, reshard_after_forward=False)
    plan = planned(f2(ADAM), method, "x:2;y:4")
    assert plan.sharding.state_bytes() == STATE_BYTES[3] + 4
    assert sent_bytes(plan) == 1_835_008 + LOSS_BYTES


@pytest.mark.parametrize(("stage", "times"), [(1, 1), (2, 4)])
def test_zero_2_scatters_the_gradients_of_every_microbatch(
    stage: int, times: int
) -> None:
    """So that no device ever holds them whole: M + 1 instead of 2 times (n-1)/n."""
    made = run if stage == 2 else planned
    plan = made(f1(), autopar.Zero(stage, num_microbatches=4), devices(8))
    assert traffic(plan) == {
        ("reduce_scatter", "x"): [32_768] * 2 * times,
        ("all_gather", "x"): [262_144] * 2,
    }


def stacked(width: int = 64, num_layers: int = 3) -> Case:
    """Layers in a loop, their kernels stacked; Adam."""

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(x @ w), None

            return jnp.mean((jax.lax.scan(layer, x, params)[0] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = ADAM.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    params = random(0, num_layers, width, width, scale=0.1)
    batch = random(1, 16, width), random(2, 16, width)
    return Case(step, ((params, ADAM.init(params)), *batch))


def test_zero_3_gathers_each_layer_in_its_iteration_forward_and_backward() -> None:
    """3 (n-1)/n: no device holds more than one layer whole."""
    plan = run(stacked(), autopar.Zero(3))
    layer = 64 * 64 * 4
    by_kind = traffic(plan)
    assert by_kind["all_gather", "x"] == [layer] * 6
    assert by_kind["reduce_scatter", "x"] == [layer // 8] * 3
    assert sum(by_kind.get(("all_reduce", "x"), [])) <= 8


@pytest.mark.parametrize("stage", [2, *(slow(stage) for stage in (1, 3))])
def test_zero_reduces_once_what_a_loop_over_time_reads_in_every_iteration(
    stage: int,
) -> None:
    workload = build("lstm", num_layers=1)
    method = autopar.Zero(stage, reshard_after_forward=stage < 3)
    step = autopar.parallelize(workload.step, mesh="x:8", method=method)
    state, batch = workload.abstract()
    params = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(state.params))
    plan = step.plan(state, batch)
    assert sent_bytes(plan) == pytest.approx(all_reduce_bytes(params, 8), abs=32)


def test_zero_leaves_whole_what_no_axis_divides() -> None:
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((x @ params["w"] + params["b"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    case = Case(step, ({"w": random(0, 10, 7), "b": random(1, 7)}, random(2, 16, 10)))
    with pytest.warns(FallbackWarning, match="they divide none"):
        plan = run(case, autopar.Zero(3))
    assert homes(plan) == {"params['b']": (-1,), "params['w']": (-1,), "x": (0,)}


def test_megatron_splits_columns_then_rows() -> None:
    """F3: two all_reduces of bsh forward and two backward."""
    plan = planned(f3(), autopar.Megatron(tensor=4), devices(4))
    assert traffic(plan) == {("all_reduce", "x"): [BSH_BYTES] * 4}
    kernels = {"qkv": (2,), "out": (0,), "up": (1,), "down": (0,)}
    found = homes(plan)
    assert {name: found[f"params['{name}']"] for name in kernels} == kernels


def test_megatron_of_two_layers_sums_the_output_alone() -> None:
    """F1, whose input needs no gradient: one sum of b d_io, as the layout d_h:all."""
    plan = run(f1(), autopar.Megatron(tensor=8))
    assert traffic(plan) == {("all_reduce", "x"): [32_768]}
    found = homes(plan)
    assert (found["params['w']"], found["params['v']"]) == ((1,), (0,))


def test_rules_that_split_the_batch_alone_are_data_parallelism() -> None:
    """F2: 2 (n-1)/n elements a parameter."""
    case = f2(ADAM)
    rules = planned(case, autopar.LayoutRules("batch:x"))
    assert sent_bytes(rules) == 2 * PSI_BYTES * 7 / 8 + LOSS_BYTES
    assert rules.diff(planned(case, autopar.DataParallel())).collectives == ()


def test_megatron_finds_the_heads_of_separate_projections() -> None:
    plan = planned(f3(fused=False), autopar.Megatron(tensor=4), devices(4))
    assert traffic(plan) == {("all_reduce", "x"): [BSH_BYTES] * 4}


def test_megatron_with_sequence_parallelism_sends_as_much() -> None:
    """Each all_reduce is an all_gather and a reduce_scatter, and norms are split."""
    method = autopar.Megatron(tensor=4, sequence=True)
    plan = run(f3(), method, devices(4))
    assert traffic(plan) == {
        ("all_gather", "x"): [BSH_BYTES] * 4,
        ("reduce_scatter", "x"): [BSH_BYTES // 4] * 4,
        ("all_reduce", "x"): [512, 512],
    }


def test_megatron_makes_its_mesh_of_groups_of_neighbours() -> None:
    """Sums of (b/2) s h over a group, gradients over the data axis."""
    case = f3()
    step = autopar.parallelize(case.step, method=autopar.Megatron(tensor=4))
    plan = run_as_planned(step, *case.args).plan
    assert str(plan.sharding.mesh) == "data:2;tensor:4"
    params = jax.tree.leaves(case.args[0])
    gradients = [p.nbytes // (4 if p.ndim > 1 else 1) for p in params]
    assert traffic(plan) == {
        ("all_reduce", "tensor"): [BSH_BYTES // 2] * 4,
        ("all_reduce", "data"): sorted(gradients, reverse=True),
    }


def test_megatron_pairs_the_layers_of_a_stack() -> None:
    """F2: kernels 0 and 2 by columns, 1 and 3 by rows: three sums of b h, the input of
    the first layer needing no gradient."""
    plan = planned(f2(ADAM), autopar.Megatron(tensor=8))
    found = homes(plan)
    kernels = [found[f"state[0]['kernel{i}']"] for i in range(4)]
    assert kernels == [(1,), (0,), (1,), (0,)]
    assert traffic(plan) == {("all_reduce", "x"): [64 * 256 * 4] * 3}


@pytest.mark.slow
def test_a_transformer_of_the_zoo_has_four_sums_a_layer() -> None:
    """The head adds one, and that of the first layer's input gradient joins the sums of
    the embeddings' gradients."""
    workload = build("gpt", num_layers=1)
    step = autopar.parallelize(
        workload.step, mesh="x:2;y:4", method=autopar.Megatron(tensor=4)
    )
    sums = traffic(step.plan(*workload.abstract()))["all_reduce", "y"]
    activation = sums[0]
    assert sums.count(activation) == 4 + 1 - 1
    assert sum(sums) < 1.1 * 4 * activation


@pytest.mark.parametrize(
    ("method", "mesh", "message"),
    [
        (autopar.DataParallel(), "x:8", r"DataParallel.* into 8 parts .* x is .*\[6,"),
        (autopar.Megatron(4), "x:8", r"last axis of 4, or leave out `mesh`"),
        (autopar.Megatron(3), None, r"`tensor` must divide .* has 8"),
    ],
)
def test_a_method_that_does_not_fit_says_why(
    method: NamedMethod, mesh: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        planned(f1(batch=6), method, mesh)


def test_a_sequence_that_does_not_reach_the_layers_is_refused() -> None:
    """The rows of an image are cut into patches, which 4 devices cannot share."""
    workload = build("vit", num_layers=1)
    method = autopar.Megatron(tensor=4, sequence=True)
    step = autopar.parallelize(workload.step, mesh="x:2;y:4", method=method)
    with pytest.raises(NotImplementedError, match="dim 1 of the batch"):
        step.plan(*workload.abstract())


def test_a_step_without_a_batch_has_nothing_to_split() -> None:
    step = autopar.parallelize(lambda scale: 2 * scale, method=autopar.DataParallel())
    with pytest.raises(ValueError, match="no argument that is batch"):
        step.plan(jax.ShapeDtypeStruct((), "float32"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: autopar.Zero(4), "stages 1 .* but got 4"),
        (lambda: autopar.Megatron(0), "from 1 up, but got 0"),
    ],
)
def test_a_method_checks_its_own_numbers(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pin_against_the_method_names_both() -> None:
    case = f1()
    step = autopar.parallelize(
        case.step, mesh="x:8", method=autopar.DataParallel(), pins={"w": P("x")}
    )
    with pytest.raises(ValueError, match=r"w'\], .* pinned to \[x, -\], which DataPar"):
        step.plan(*case.args)


def test_rules_and_a_method_that_disagree_name_both() -> None:
    case = f1()
    rules = autopar.LayoutRules("hidden:y", {"params['w']": "io hidden"})
    step = autopar.parallelize(
        case.step, mesh="x:2;y:4", method=autopar.DataParallel(), rules=rules
    )
    with pytest.raises(ValueError, match=r"DataParallel.* and LayoutRules\('hidden:y"):
        step.plan(*case.args)
