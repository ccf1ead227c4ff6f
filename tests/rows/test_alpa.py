"""Rows of Alpa: one decorator, one solver for intra-operator plans, and stages."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.clusters.cluster import Cluster
from autopar.runtime.transfers import Transfer, plan_transfer
from autopar.solver import ChoiceGraph, solve
from benchmarks.models.registry import build
from tests.rows.fixtures import (
    BSH_BYTES,
    HEADS,
    MLP,
    Case,
    dense_stack,
    encoder,
    f1,
    f6,
    many_transformations,
    mixture_of_experts,
    random,
    sgd,
)
from tests.rows.named_plans import plan_of_layout, plan_within, problem_of
from tests.rows.running import (
    all_reduce_bytes,
    homes,
    run_as_planned,
    run_pipeline_as_planned,
    sent_bytes,
    traffic,
)
from tests.solver.brute_force import brute_force


def workload(name: str, **options: Any) -> Case:
    """A model of the benchmarks, its state and a batch."""
    built = build(name, optimizer="sgd", **options)
    return Case(built.step, (built.init(jax.random.key(0)), built.make_batch(0)))


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: dense_stack(64, 32, num_layers=3),
    "gpt": lambda: workload("gpt", scan_layers=True, remat=True),
    "bert": lambda: workload("bert", num_layers=1),
    "moe": mixture_of_experts,
    "wide-resnet": lambda: workload(
        "resnet", stage_sizes=(1,), block="bottleneck", width_factor=2
    ),
    "transformations": many_transformations,
}


@pytest.mark.parametrize("name", MODELS)
def test_alp_1_one_decorator_gives_the_same_losses(name: str) -> None:
    case = MODELS[name]()
    parallel_step = autopar.parallelize(case.step)
    parallel_step.lower(*case.args).compile().audit().raise_if_wrong()
    losses = {}
    for step in (parallel_step, jax.jit(case.step)):
        state, batch = jax.tree.map(jnp.copy, case.args)
        losses[step] = []
        for _ in range(5):
            state, metrics = step(state, batch)
            losses[step].append(float(*jax.tree.leaves(metrics)))
    got, want = losses.values()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[4] < want[0]


def test_alp_1_state_is_donated() -> None:
    case = many_transformations()
    step = autopar.parallelize(case.step)
    state, _ = step(*case.args)
    step(state, case.args[1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def fitting(graph: ChoiceGraph) -> ChoiceGraph:
    """The same graph without the choices that are forbidden."""
    kept = [np.flatnonzero(np.isfinite(node.costs)) for node in graph.nodes]
    nodes = tuple(
        replace(node, costs=node.costs[k], bytes=node.bytes[k])
        for node, k in zip(graph.nodes, kept, strict=True)
    )
    edges = tuple(
        replace(
            edge,
            first_class=edge.first_class[kept[edge.first]],
            second_class=edge.second_class[kept[edge.second]],
        )
        for edge in graph.edges
    )
    return replace(graph, nodes=nodes, edges=edges)


# Odd sizes cannot be split: they keep the number of assignments small.
SMALL: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "dot_relu_dot": (lambda x, w, v: jax.nn.relu(x @ w) @ v, ((3, 4), (4, 2), (2, 3))),
    "dot_tanh_dot": (lambda x, w, v: jnp.tanh(x @ w) @ v, ((4, 3), (3, 4), (4, 1))),
    "sum_of_dots": (
        lambda a, b, c, d: jnp.tanh(a @ b + c @ d),
        ((3, 4), (4, 5), (3, 4), (4, 5)),
    ),
    "attention": (lambda q, k, v: jnp.exp(q @ k.T) @ v, ((4, 3), (2, 3), (2, 3))),
    "linear_sgd": (
        lambda w, x, y: w - 0.1 * (x.T @ (x @ w - y)),
        ((3, 5), (4, 3), (4, 5)),
    ),
    "normalise": (lambda x: x / x.sum(axis=-1, keepdims=True), ((4, 3),)),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("scale", [1.0, 1e3], ids=["launches", "bytes"])
def test_alp_2_the_solver_equals_brute_force(name: str, scale: float) -> None:
    """Up to six operators over 2 x 2. Launches decide between tiny tensors, or bytes
    on a device whose flops, memory and links are all a thousand times slower."""
    fun, shapes = SMALL[name]
    case = Case(fun, tuple(random(i, *shape) for i, shape in enumerate(shapes)))
    graph = fitting(problem_of(case, "a:2;b:2", slowed(scale)).choice_graph)
    assert prod(node.costs.size for node in graph.nodes) <= 100_000
    best, found = brute_force(graph), solve(graph, gap=0.0)
    assert found.cost == pytest.approx(best.cost, rel=1e-12)
    assert found.bound <= best.cost * (1 + 1e-12)


def slowed(scale: float) -> Cluster:
    local = Cluster.local()
    device = replace(
        local.device,
        peak_flops={k: v / scale for k, v in local.device.peak_flops.items()},
        memory_bandwidth=local.device.memory_bandwidth / scale,
    )
    link = replace(local.host_link, bandwidth=local.host_link.bandwidth / scale)
    return replace(local, device=device, host_link=link)


def without_launches() -> Cluster:
    """The local cluster, where collectives cost their bytes alone."""
    local = Cluster.local()
    link = replace(local.host_link, alpha_seconds=0.0)
    return replace(local, launch_seconds=0.0, host_link=link)


@pytest.mark.parametrize("batch", [64, 512, 1016, 1032, 2048])
def test_alp_2_f1_changes_at_batch_1024(batch: int) -> None:
    """Below, the hidden dim is split and the activation reduced: b d_io elements.
    Above, the batch is, and the gradients are reduced: 2 d_io d_h elements."""
    case = f1(batch)
    step = autopar.parallelize(case.step, mesh="x:8", cluster=without_launches())
    plan = step.plan(*case.args)
    reduced_bytes = batch * 128 * 4 if batch < 1024 else 524_288
    assert sent_bytes(plan) == all_reduce_bytes(reduced_bytes, 8)
    (hidden,) = [op for op in plan.sharding.operators if op.kind == "max"]
    assert hidden.factors == (("d1",) if batch < 1024 else ("d0",))


@pytest.mark.parametrize(("batch", "factor"), [(64, "d1"), (1024, "d1"), (2048, "d0")])
def test_alp_2_f1_on_this_cluster_prefers_fewer_collectives(
    batch: int, factor: str
) -> None:
    """One launch more, for the second weight, moves the change a little up."""
    case = f1(batch)
    step = autopar.parallelize(case.step, mesh="x:8")
    plan = run_as_planned(step, *case.args).plan
    (hidden,) = [op for op in plan.sharding.operators if op.kind == "max"]
    assert hidden.factors == (factor,)


@pytest.mark.parametrize("batch", [64, 2048])
def test_alp_2_f1_data_parallel_reduces_524288_bytes_at_any_batch(batch: int) -> None:
    case = f1(batch)
    named = plan_of_layout(case, "x:8", {batch: "x"})
    assert traffic(named) == {("all_reduce", "x"): [262_144, 262_144]}
    plan = autopar.parallelize(case.step).plan(*case.args)
    assert plan.predicted.step_seconds < named.predicted.step_seconds
    run_as_planned(autopar.parallelize(case.step, plan=named), *case.args)


def test_alp_2_f1_hidden_parallel_reduces_32768_bytes() -> None:
    case = f1()
    named = plan_of_layout(case, "x:8", {512: "x"})
    assert traffic(named) == {("all_reduce", "x"): [32_768]}
    plan = autopar.parallelize(case.step, mesh="x:8").plan(*case.args)
    assert sent_bytes(plan) == all_reduce_bytes(32_768, 8)
    assert plan.predicted.step_seconds <= named.predicted.step_seconds


def test_alp_2_a_memory_cap_that_data_parallel_breaks_shards_the_weights() -> None:
    """At batch 2,048 data parallel keeps 524,288 B of weights on each device. Under
    100,000 B the batch is split as before and the weights lie in eight parts, gathered
    when they are read instead of after they are updated: that costs nothing more."""
    case = f1(2048)
    named = plan_of_layout(case, "x:8", {2048: "x"})
    plan = plan_within(case, "x:8", state_bytes=100_000)
    assert named.sharding.state_bytes() == 524_288
    assert plan.sharding.state_bytes() == 524_288 // 8
    assert traffic(plan) == {
        ("all_gather", "x"): [262_144] * 2,
        ("reduce_scatter", "x"): [32_768] * 2,
    }
    assert plan.predicted.step_seconds < named.predicted.step_seconds
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)


def four_devices(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[:4]).reshape(sizes)
    return Mesh(devices, ("a", "b")[: len(sizes)])


def test_alp_2_wide_batch_reduces_the_parameters_bytes_and_nothing_else() -> None:
    """Six layers, batch 256, hidden 32: data parallel sends what the parameters hold
    (and the loss). The solver's plan costs less: it begins with a column and a row
    split, so that the first two layers' optimizer and gradients are sharded."""
    case = dense_stack(256, 32)
    named = plan_of_layout(case, four_devices(4), {256: "a"})
    sizes = traffic(named)["all_reduce", "a"]
    assert sum(sizes) == 6 * (32 * 32 + 32) * 4 + 4 == 25_348
    assert traffic(named).keys() == {("all_reduce", "a")}
    run_as_planned(autopar.parallelize(case.step, plan=named), *case.args)

    step = autopar.parallelize(case.step, mesh=four_devices(4))
    plan = run_as_planned(step, *case.args).plan
    assert plan.predicted.step_seconds < named.predicted.step_seconds


def alternating(axis: str, num_layers: int = 6) -> dict[str, P]:
    """Kernels, and Adam's moments of them, split by column, row, column, ..."""
    specs = (P(None, axis), P(axis))
    return {rf"\[{i}\]\['kernel'\]": specs[i % 2] for i in range(num_layers)}


def test_alp_2_wide_layers_are_split_by_column_and_row() -> None:
    """Six layers, batch 32, hidden 256: five reductions of the activations, three
    forward (after each row split) and two backward (before each column split but the
    first). Free to choose, the solver sends the same bytes at a lower cost."""
    case = dense_stack(32, 256)
    activation_bytes = 32 * 256 * 4
    mesh = four_devices(4)
    plans = [
        run_as_planned(autopar.parallelize(case.step, mesh=mesh, **pins), *case.args)
        for pins in ({"pins": alternating("a")}, {})
    ]
    named, plan = (compiled.plan for compiled in plans)
    scalar = all_reduce_bytes(4, 4)  # the loss
    expected = 5 * all_reduce_bytes(activation_bytes, 4) + scalar
    assert sent_bytes(named) == sent_bytes(plan) == expected
    assert plan.predicted.step_seconds <= named.predicted.step_seconds
    kernels = [homes(plan)[f"state[0][{i}]['kernel']"] for i in range(6)]
    assert all(kernel != (-1,) for kernel in kernels)


def test_alp_2_on_two_axes_no_mixed_plan_is_cheaper() -> None:
    """Batch over one axis and kernels by column and row over the other."""
    case = dense_stack(32, 256)
    mesh, data = four_devices(2, 2), P("a", autopar.FREE)
    pins = {**alternating("b"), r"^batch\['[xy]'\]$": data}
    step = autopar.parallelize(case.step, mesh=mesh, pins=pins)
    mixed = run_as_planned(step, *case.args).plan
    plan = autopar.parallelize(case.step, mesh=mesh).plan(*case.args)
    assert plan.predicted.step_seconds < mixed.predicted.step_seconds
    flat = autopar.parallelize(case.step, mesh=four_devices(4)).plan(*case.args)
    assert plan.predicted.step_seconds <= flat.predicted.step_seconds * (1 + 1e-4)


def test_alp_2_bert_reduces_activations_four_times_a_layer_less_one() -> None:
    """Two layers: qkv and the MLP's up by column, out and down by row. The input of
    the first layer needs no gradient. The solver's plan scatters and gathers instead,
    and norms each shard of the sequence once."""
    case, mesh = encoder(2), four_devices(4)
    named = plan_of_layout(case, mesh, {HEADS: "a", MLP: "a"})
    assert traffic(named) == {("all_reduce", "a"): [BSH_BYTES] * (4 * 2 - 1)}
    run_as_planned(autopar.parallelize(case.step, plan=named), *case.args)

    step = autopar.parallelize(case.step, mesh=mesh)
    plan = run_as_planned(step, *case.args).plan
    columns_and_rows = {"qkv": (2,), "up": (1,), "out": (0,), "down": (0,)}
    for i in range(2):
        for name, spec in columns_and_rows.items():
            assert homes(plan)[f"layers[{i}]['{name}']"] == spec
    assert plan.predicted.step_seconds < named.predicted.step_seconds


def test_alp_3_f6_is_four_stages_of_two_layers() -> None:
    """Each stage holds its two layers, and one microbatch of four rows crosses."""
    case = f6()
    method = autopar.PipelineParallel(num_stages=4, num_microbatches=8)
    step = autopar.parallelize(case.step, method=method)
    plan = run_pipeline_as_planned(step, *case.args).plan
    layers = [
        [i.path for i in each.sharding.inputs if i.path.startswith("layers[")]
        for each in plan.stages.programs
        if each.kind == "apply"
    ]
    assert layers == [[f"layers[{2 * k}]", f"layers[{2 * k + 1}]"] for k in range(4)]
    assert {t.bytes for t in plan.stages.transfers} == {1_024}
    new_layers, _ = step(*case.args)
    stages = [{d.id // 2 for d in layer.devices()} for layer in new_layers]
    assert stages == [{k} for k in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_alp_3_six_layers_on_any_number_of_stages_give_the_same_state() -> None:
    case = dense_stack(16, 32)
    for num_stages, meshes in ((2, None), (3, ["a:4", "a:2", "a:2"])):
        method = autopar.PipelineParallel(num_stages, 4, stage_meshes=meshes)
        step = autopar.parallelize(case.step, method=method)
        run_pipeline_as_planned(step, *case.args)


@pytest.mark.parametrize("semantics", ["exact", "independent"])
def test_alp_5_gradients_are_accumulated_and_reduced_once_a_step(
    semantics: Any,
) -> None:
    """The gradient of a 64 x 64 weight is 16,384 bytes; the other sum is the loss."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w))

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    args = random(0, 64, 64, scale=0.125), random(1, 4096, 64)
    method = autopar.ShardParallel(4, microbatch_semantics=semantics)
    pins = {"w": P(), "x": P("data")}
    parallel = autopar.parallelize(step, method=method, mesh="data:8", pins=pins)
    compiled = run_as_planned(parallel, *args)
    found = [(e.kind, e.count, e.bytes) for e in compiled.plan.sharding.collectives]
    assert sorted(found) == [("all_reduce", 1, 4), ("all_reduce", 1, 16_384)]
    body = compiled.as_text().partition("\nENTRY ")[0]
    assert "while(" in compiled.as_text() and " all-reduce(" not in body


def test_alp_6_a_tensor_goes_from_one_mesh_to_another_of_other_shape() -> None:
    """From four devices, split in rows over x, to four others, split over y (and z)."""

    def step(
        w: list[jax.Array], x: jax.Array, y: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        def loss(w: list[jax.Array]) -> jax.Array:
            return jnp.mean((jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return sgd(w, grads), value

    w = [random(i, 64, 64, scale=0.1) for i in (0, 1)]
    args = w, random(2, 1024, 64), random(3, 1024, 64)
    method = autopar.PipelineParallel(2, 2, stage_meshes=["x:4", "y:2;z:2"])
    pins = {"x": P("x"), "w[0]": P(), "y": P("y"), "w[1]": P("z")}
    parallel = autopar.parallelize(step, method=method, pins=pins)
    compiled = run_pipeline_as_planned(parallel, *args)
    (up,) = [
        t for t in compiled.plan.stages.transfers if (t.source, t.target) == (0, 1)
    ]
    program = compiled.lowered.step.pipeline.program
    source, target = (program.shardings[up.slot, stage] for stage in (0, 1))
    # The rows are split over y; the solver may split them over z, too.
    assert source.spec == P("x")
    assert target.spec in (P("y"), P(("y", "z")))
    finer = NamedSharding(target.mesh, P("y", "z"))
    for wanted in (target, finer):
        transfer = plan_transfer((512, 64), jnp.float32, source, wanted)
        assert transfer.sent_bytes == up.bytes == 512 * 64 * 4
        sent = Transfer(transfer)(jax.device_put(args[1][:512], source))
        assert sent.sharding.is_equivalent_to(wanted, 2)
        np.testing.assert_array_equal(sent, args[1][:512])
