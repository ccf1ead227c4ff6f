"""Rows of DeepSpeed's ZeRO and of FSDP: state in parts, on F2 over eight devices."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.audit.compiled_collectives import collectives_in_compiled
from autopar.costs.collectives import wire_bytes
from autopar.errors import FallbackWarning
from autopar.methods.named_methods import NamedMethod
from autopar.sharding.collective import Collective, CollectiveKind
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case, Params, random, sgd
from tests.rows.running import (
    all_reduce_bytes,
    homes,
    run_as_planned,
    sent_bytes,
    traffic,
)
from tests.rows.test_fairscale import BATCH, WIDTH, f2

ADAM = optax.adam(1e-2, eps=1e-3)
NUM_LAYERS, NUM_DEVICES = 4, 8
LAYER_BYTES = WIDTH * WIDTH * 4
PSI_BYTES = NUM_LAYERS * LAYER_BYTES
BATCH_BYTES = 2 * BATCH * WIDTH * 4 // NUM_DEVICES
COUNT_BYTES = 4  # Adam's step counter, which is optax's
LOSS_BYTES = all_reduce_bytes(4, NUM_DEVICES)


def adam() -> Case:
    return f2(ADAM)


@cache
def compiled(make: Callable[[], Case], method: NamedMethod) -> Compiled:
    """The step of a method, which runs as planned with the values of one device."""
    case = make()
    step = autopar.parallelize(case.step, mesh=f"x:{NUM_DEVICES}", method=method)
    return run_as_planned(step, *case.args)


def memory(step: Compiled) -> Any:
    """What the compiler says of the bytes of one device."""
    return step.lowered.program.compile().memory_analysis()


def traffic_bytes(found: Sequence[Collective]) -> float:
    """Bytes that one device sends, all collectives being rings."""
    return sum(
        wire_bytes(
            cast("CollectiveKind", each.kind), each.total_bytes, len(each.groups[0])
        )
        for each in found
    )


def checkpointed() -> Case:
    """F2, each layer under `jax.checkpoint`: the backward pass does it all again."""
    optimizer = ADAM

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: dict[str, jax.Array]) -> jax.Array:
            hidden = x
            for kernel in params.values():
                layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
                hidden = layer(hidden, kernel)
            return jnp.mean((hidden - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Case(step, f2(optimizer).args)


def scanned() -> Case:
    """F2's layers in a loop over their stacked kernels, by plain descent."""

    def step(params: Params, x: jax.Array, y: jax.Array) -> Params:
        def loss(params: Params) -> jax.Array:
            def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(x @ w), None

            return jnp.mean((jax.lax.scan(layer, x, params["w"])[0] - y) ** 2)

        return sgd(params, jax.grad(loss)(params))

    params = {"w": random(0, NUM_LAYERS, WIDTH, WIDTH, scale=0.06)}
    return Case(step, (params, random(8, BATCH, WIDTH), random(9, BATCH, WIDTH)))


SCATTERED = {
    ("reduce_scatter", "x"): [32_768] * 4,
    ("all_gather", "x"): [262_144] * 4,
    ("all_reduce", "x"): [4],
}


def test_zer_1_moments_in_eighths_send_what_data_parallel_sends() -> None:
    """3,162,112 B of arguments become 1,327,104; traffic stays 1,835,008 B."""
    whole = compiled(adam, autopar.DataParallel())
    split = compiled(adam, autopar.Zero(1))
    assert memory(whole).argument_size_in_bytes == 3_162_112 + COUNT_BYTES
    assert memory(split).argument_size_in_bytes == 1_327_104 + COUNT_BYTES
    assert traffic(split.plan) == SCATTERED
    assert sent_bytes(whole.plan) == sent_bytes(split.plan) == 1_835_008 + LOSS_BYTES


def test_zer_1_annotations_alone_send_half_as_much_again() -> None:
    """Stock JAX on CPU sums gradients whole and gathers the update: 2,752,512 B."""
    case = f2(ADAM)
    mesh = Mesh(jax.devices(), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(spec: P) -> Any:
        return lambda leaf: NamedSharding(mesh, spec if leaf.ndim else P())

    params, moments = case.args[0]
    state = jax.tree.map(place(P()), params), jax.tree.map(place(P("x")), moments)
    batch = NamedSharding(mesh, P("x"))
    step = jax.jit(
        case.step, in_shardings=(state, batch, batch), out_shardings=(state, None)
    )
    text = step.lower(*case.args).compile().as_text() or ""
    found = collectives_in_compiled(text)
    assert {each.kind for each in found} == {"all_reduce", "all_gather"}
    assert traffic_bytes(found) == 2_752_512 + LOSS_BYTES


def test_zer_2_gradients_are_scattered_and_parameters_gathered() -> None:
    """Temporaries are a fraction of the 2,097,248 B that annotations take."""
    step = compiled(adam, autopar.Zero(2))
    assert traffic(step.plan) == SCATTERED
    assert sent_bytes(step.plan) == 1_835_008 + LOSS_BYTES
    assert memory(step).argument_size_in_bytes == 1_327_104 + COUNT_BYTES
    assert memory(step).temp_size_in_bytes < 2_097_248 / 3


def test_zer_3_every_layer_is_gathered_for_each_pass() -> None:
    """8 gathers and 4 scatters: 3 Psi (n-1)/n, on 409,600 B of arguments."""
    step = compiled(checkpointed, autopar.Zero(3))
    assert traffic(step.plan) == SCATTERED | {("all_gather", "x"): [262_144] * 8}
    assert sent_bytes(step.plan) == 3 * PSI_BYTES * 7 / 8 + LOSS_BYTES
    assert sent_bytes(step.plan) == 2_752_512 + LOSS_BYTES
    assert memory(step).argument_size_in_bytes == 409_600 + COUNT_BYTES
    assert num_gathers(step) == 8


def test_zer_3_what_the_backward_pass_does_not_read_is_gathered_once() -> None:
    """Without recomputation nothing needs the first layer's kernel a second time."""
    step = compiled(adam, autopar.Zero(3))
    assert traffic(step.plan) == SCATTERED | {("all_gather", "x"): [262_144] * 7}
    assert memory(step).argument_size_in_bytes == 409_600 + COUNT_BYTES
    assert num_gathers(step) == 7


def test_zer_3_activations_stay_where_they_are() -> None:
    """Parameters in parts must not make activations move, by all_to_all as by XLA."""
    for case in (f2(ADAM), checkpointed(), scanned()):
        step = autopar.parallelize(case.step, mesh="x:8", method=autopar.Zero(3))
        plan = step.plan(*case.args)
        assert {kind for kind, _ in traffic(plan)} <= {
            "all_gather",
            "reduce_scatter",
            "all_reduce",
        }
        sizes = [each.bytes for each in plan.sharding.collectives]
        assert set(sizes) <= {LAYER_BYTES, LAYER_BYTES // NUM_DEVICES, 4}


def num_gathers(step: Compiled) -> int:
    """How many gathers the compiled program has, after all that XLA did to it."""
    text = step.lowered.program.compile().as_text() or ""
    found = collectives_in_compiled(text)
    return sum(each.count for each in found if each.kind == "all_gather")


def test_fsc_3_parameters_are_gathered_again_or_kept() -> None:
    """On: 8 gathers, and 4 more kernels' worth of memory is not held. Off: 4."""
    on = compiled(checkpointed, autopar.Zero(3))
    off = compiled(adam, autopar.Zero(3, reshard_after_forward=False))
    assert (num_gathers(on), num_gathers(off)) == (8, 4)
    assert sent_bytes(off.plan) == 2 * PSI_BYTES * 7 / 8 + LOSS_BYTES


def test_fsc_3_memory_falls_in_unrolled_layers_too() -> None:
    on = compiled(adam, autopar.Zero(3))
    off = compiled(adam, autopar.Zero(3, reshard_after_forward=False))
    saved = memory(off).temp_size_in_bytes - memory(on).temp_size_in_bytes
    assert saved > 0.75 * LAYER_BYTES
    saved = off.plan.predicted.peak_bytes - on.plan.predicted.peak_bytes
    assert saved > 0.75 * LAYER_BYTES


def test_fsc_3_a_loop_holds_two_gathered_layers_or_all() -> None:
    """On: a gathered layer, its gradient and less than a layer besides; off: all."""
    on = compiled(scanned, autopar.Zero(3))
    off = compiled(scanned, autopar.Zero(3, reshard_after_forward=False))
    assert traffic(on.plan)["all_gather", "x"] == [LAYER_BYTES] * 8
    assert traffic(off.plan)["all_gather", "x"] == [PSI_BYTES]
    assert sent_bytes(on.plan) == 2_752_512
    assert sent_bytes(off.plan) == 1_835_008
    assert memory(on).temp_size_in_bytes < 3 * LAYER_BYTES
    assert memory(off).temp_size_in_bytes >= PSI_BYTES == 1_048_576


@pytest.mark.parametrize("stage", [1, 2])
def test_only_split_parameters_can_be_kept_whole(stage: int) -> None:
    with pytest.raises(ValueError, match=f"as in stage 3, but got stage {stage}"):
        autopar.Zero(stage, reshard_after_forward=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zer_6_memory_is_known_before_running(stage: int) -> None:
    """The plan's bytes of arguments are the compiler's, also after a saved plan."""
    case = f2(ADAM)
    method = autopar.Zero(stage) if stage else autopar.DataParallel()
    step = autopar.parallelize(case.step, mesh="x:8", method=method)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.args)
    planned = sum(each.bytes for each in step.plan(*shapes).sharding.inputs)
    seen = memory(step.lower(*shapes).compile()).argument_size_in_bytes
    assert planned == pytest.approx(seen, rel=0.05)
    expected = {0: 3_162_112, 1: 1_327_104, 2: 1_327_104, 3: 409_600}[stage]
    assert planned == expected + COUNT_BYTES


def test_zer_6_shapes_that_no_device_count_divides_train_and_are_reported() -> None:
    """Parameters of (10, 7) and (3,): held whole, and the user is told."""

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            hidden = jnp.tanh(x @ params["w"])
            return jnp.mean((hidden[:, :3] * params["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = ADAM.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {"w": random(0, 10, 7), "b": random(1, 3)}
    case = Case(step, ((params, ADAM.init(params)), random(2, 16, 10)))
    parallel = autopar.parallelize(step, mesh="x:8", method=autopar.Zero(3))
    with pytest.warns(FallbackWarning, match=r"\[10, 7\].* they divide none.*876 of"):
        plan = run_as_planned(parallel, *case.args).plan
    assert all(spec == (-1,) for path, spec in homes(plan).items() if path != "x")
    state, x = jax.tree.map(jnp.copy, case.args)
    expected = case.args[0]
    for _ in range(5):
        state, loss = parallel(state, x)
        expected, want = jax.jit(step)(expected, case.args[1])
        np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_a_saved_plan_gathers_again(tmp_path: Any) -> None:
    """The plan says by itself what is gathered twice."""
    case = f2(ADAM)
    step = autopar.parallelize(case.step, mesh="x:8", method=autopar.Zero(3))
    plan = step.plan(*case.args)
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = autopar.parallelize(case.step, plan=autopar.Plan.load(path))
    assert num_gathers(run_as_planned(loaded, *case.args)) == 7
