"""Pipelines that cut a scan over layers by length: values, homes and what crosses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from autopar.state.distributed_array import DistributedArray
from benchmarks.models import build
from tests import random_arrays
from tests.marks import slow

normal = partial(random_arrays.normal, scale=0.3)

Case = tuple[Callable[..., Any], Any, Any]
WIDTH = 16
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))


def batch() -> Any:
    return {"x": normal(90, 8, 4, WIDTH), "y": normal(91, 8, 4, WIDTH)}


def stack(num_layers: int) -> Any:
    return {
        "in": normal(1, WIDTH, WIDTH),
        "w": normal(2, num_layers, WIDTH, WIDTH),
        "b": normal(3, num_layers, WIDTH),
        "out": normal(4, WIDTH, WIDTH),
    }


def block(x: jax.Array, layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ layer[0] + layer[1]), None


def training(
    predict: Callable[..., Any],
    params: Any,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    """A train step; `predict(params, batch)` returns predictions and a loss besides."""
    optimizer = optimizer or optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-4)
    )

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss(params: Any) -> jax.Array:
            predicted, extra = predict(params, batch)
            return jnp.mean((predicted - batch["y"]) ** 2) + extra

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step, (params, optimizer.init(params)), batch()


def plain(num_layers: int, optimizer: Any = None) -> Case:
    def predict(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["in"]
        x, _ = lax.scan(block, x, (params["w"], params["b"]))
        return x @ params["out"], 0.0

    return training(predict, stack(num_layers), optimizer)


def casts_outside_of_the_scan() -> Case:
    def predict(params: Any, batch: Any) -> Any:
        params, x = jax.tree.map(lambda p: p.astype(jnp.bfloat16), (params, batch["x"]))
        x, _ = lax.scan(block, x @ params["in"], (params["w"], params["b"]))
        return (x @ params["out"]).astype(jnp.float32), 0.0

    return training(predict, stack(4), optax.sgd(0.1))


def remat_and_casts_inside() -> Case:
    """Parameters of the stack are cast outside of the scan, and again inside."""

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        kernel, bias = layer
        y = jnp.tanh(x.astype(jnp.bfloat16) @ kernel + bias.astype(jnp.bfloat16))
        return x + y.astype(jnp.float32), None

    def predict(params: Any, batch: Any) -> Any:
        layers = params["w"].astype(jnp.bfloat16), params["b"]
        x, _ = lax.scan(jax.checkpoint(body), batch["x"] @ params["in"], layers)
        return x @ params["out"], 0.0

    return training(predict, stack(4), optax.sgd(0.01, momentum=0.9))


def shared_weights_and_aux_losses() -> Case:
    """A weight that all layers read, and losses that layers add up and stack."""

    def predict(params: Any, batch: Any) -> Any:
        def body(carry: Any, layer: Any) -> Any:
            x, added = carry
            number, kernel, bias = layer
            y = jnp.tanh(x @ kernel @ params["shared"] + bias)
            return (x + y * number, added + jnp.mean(y**2)), jnp.mean(jnp.abs(y))

        layers = (jnp.arange(1.0, 5.0), params["w"], params["b"])
        start = (batch["x"] @ params["in"], 0.0)
        (x, added), each = lax.scan(body, start, layers)
        return x @ params["out"], added + (each * jnp.arange(4.0)).sum()

    params = {**stack(4), "shared": normal(7, WIDTH, WIDTH)}
    return training(predict, params, CLIPPED)


def encoder_decoder() -> Case:
    """Two scans of 4 and 2 layers; the second reads what the first made."""

    def predict(params: Any, batch: Any) -> Any:
        def encode(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ kernel), None

        memory, _ = lax.scan(encode, batch["x"], params["encoder"])

        def decode(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            scores = jnp.einsum("bth,bsh->bts", x @ layer["q"], memory)
            return x + jax.nn.softmax(scores) @ memory @ layer["o"], None

        x, _ = lax.scan(decode, batch["y"], params["decoder"])
        return x @ params["out"], 0.0

    layers = {"q": normal(2, 2, WIDTH, WIDTH), "o": normal(3, 2, WIDTH, WIDTH)}
    encoder = normal(1, 4, WIDTH, WIDTH)
    out = normal(5, WIDTH, WIDTH)
    params = {"encoder": encoder, "decoder": layers, "out": out}
    return training(predict, params, optax.sgd(0.1))


def groups_of_layers_backwards() -> Case:
    """A scan over pairs of layers, last pair first, that holds a scan over each."""

    def predict(params: Any, batch: Any) -> Any:
        pairs = params["w"].reshape(3, 2, WIDTH, WIDTH)

        def body(x: jax.Array, pair: jax.Array) -> tuple[jax.Array, None]:
            return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, pair)

        x, _ = lax.scan(body, batch["x"] @ params["in"], pairs, reverse=True)
        return x @ params["out"], 0.0

    params = {name: x for name, x in stack(6).items() if name != "b"}
    return training(predict, params, optax.sgd(0.01))


def dropout_from_a_carried_key() -> Case:
    """The key is state, split before the scan, carried and split by every layer."""

    def step(state: Any, batch: Any) -> Any:
        params, key = state
        key, dropout_key = jax.random.split(key)

        def loss(params: Any) -> jax.Array:
            def body(carry: Any, kernel: jax.Array) -> Any:
                x, key = carry
                key, own = jax.random.split(key)
                y = jnp.tanh(x @ kernel)
                kept = jax.random.bernoulli(own, 0.8, y.shape)
                return (x + jnp.where(kept, y / 0.8, 0.0), key), None

            start = batch["x"] @ params["in"], dropout_key
            (x, _), _ = lax.scan(body, start, params["w"])
            return jnp.mean((x @ params["out"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), key), value

    params = {name: x for name, x in stack(4).items() if name != "b"}
    return step, (params, jax.random.PRNGKey(4)), batch()


def scanned_gpt(**options: Any) -> Case:
    sizes = dict(hidden=32, num_heads=4, seq_len=8, vocab_size=64, batch_size=8)
    workload = build(
        "gpt", optimizer="adamw_clip", scan_layers=True, **sizes, **options
    )
    return workload.step, workload.init(jax.random.key(0)), workload.make_batch(0)


def assert_like_the_full_batch(
    case: Case, method: PipelineParallel, rtol: float = 2e-4
) -> tuple[Any, Any]:
    """The whole state after 2 steps; returns it and the pipeline."""
    fun, state, batch = case
    reference = jax.jit(fun)
    step: Any = parallelize(fun, method=method)
    expected: Any = (jax.device_get(state), None)
    got: Any = (state, None)
    for _ in range(2):
        expected = reference(expected[0], batch)
        got = step(got[0], batch)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), b, rtol=rtol, atol=2e-5)
    (pipelined,) = step._running()
    return got[0], pipelined.pipeline


def lowered(case: Case, method: PipelineParallel) -> Any:
    """The pipeline, which is not compiled."""
    fun, state, batch = case
    step: Any = parallelize(fun, method=method)
    return step.lower(state, batch).step.pipeline


def crossing(pipeline: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of what stages send to each other, but for the batch."""
    slots = pipeline.program.slots
    return {
        name: pipeline.planned.types[name].shape
        for name, stage in pipeline.program.shardings
        if slots[name].kind not in ("state", "batch") and slots[name].stage != stage
    }


def of_single_devices(num_stages: int, num_microbatches: int) -> PipelineParallel:
    return PipelineParallel(
        num_stages, num_microbatches, stage_meshes=["x:1"] * num_stages
    )


GPT = [
    slow(dict(num_layers=3, tied=False), 2, (2, 1)),
    slow(
        dict(num_layers=4, tied=True, remat=True),
        4,
        (1, 1, 1, 1),
    ),
]


@pytest.mark.parametrize(("options", "num_stages", "lengths"), GPT)
def test_a_scanned_gpt_is_cut_by_length(
    options: Any, num_stages: int, lengths: tuple[int, ...]
):
    method = PipelineParallel(num_stages, 4)
    state, pipeline = assert_like_the_full_batch(scanned_gpt(**options), method)
    assert {n for n in pipeline.chunked.input_lengths if n} == {lengths}
    if num_stages == 2:  # compiles every program again
        assert all(each.ok for each in pipeline.audit())
    tied = {"sum of transpose(jvp())/dot_general.0"} if options["tied"] else set()
    for name, shape in crossing(pipeline).items():
        assert shape in ((), (2, 8, 32)) or name in tied, (name, shape)
    for leaf in jax.tree.leaves(state.params["layers"]):
        assert_on_its_stages(leaf, lengths)


def assert_on_its_stages(leaf: Any, lengths: tuple[int, ...]) -> None:
    """Rows of piece k are on the devices of stage k and nowhere else."""
    share = len(jax.devices()) // len(lengths)
    pieces: Any = leaf.chunks if isinstance(leaf, DistributedArray) else [leaf]
    rows = 0
    for piece in pieces:
        for shard in piece.addressable_shards:
            first = rows + (shard.index[0].start or 0)
            stage = shard.device.id // share
            begin = sum(lengths[:stage])
            assert begin <= first < begin + lengths[stage]
            assert shard.data.shape[0] <= lengths[stage]
        rows += piece.shape[0]


@pytest.mark.parametrize(
    ("make", "num_stages", "lengths"),
    [
        (shared_weights_and_aux_losses, 2, {(2, 2)}),
        (encoder_decoder, 3, {(3, 1), (1, 1)}),
        (groups_of_layers_backwards, 2, {(4, 2)}),  # the last pair runs first
        (dropout_from_a_carried_key, 2, {(2, 2)}),
    ],
)
def test_any_scan_over_layers_is_cut(
    make: Callable[[], Case], num_stages: int, lengths: set[tuple[int, ...]]
):
    method = of_single_devices(num_stages, 2)
    _, pipeline = assert_like_the_full_batch(make(), method)
    assert {n for n in pipeline.chunked.input_lengths if n} == lengths
    largest = max(np.prod(shape, dtype=int) for shape in crossing(pipeline).values())
    assert largest <= 4 * 4 * WIDTH  # the activations of one microbatch


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "lengths"),
    [
        slow(10, 4, (2, 3, 3, 2)),
        (2, 4, (1, 1)),
        (4, 3, (1, 2, 1)),
    ],
)
def test_chunks_share_out_the_forward_flops(
    num_layers: int, num_stages: int, lengths: tuple[int, ...]
):
    """The first and the last stage have another product of a layer's size."""
    method = of_single_devices(num_stages, 2)
    pipeline = lowered(plain(num_layers), method)
    assert {n for n in pipeline.chunked.input_lengths if n} == {lengths}
    # While the global norm crosses, no decayed moment waits in memory.
    waiting = [
        np.prod(pipeline.planned.types[name].shape, dtype=int)
        for name, slot in pipeline.program.slots.items()
        if slot.kind == "activation" and name.startswith("apply ")
    ]
    assert sum(size for size in waiting if size > 1) <= 2 * WIDTH * WIDTH


@pytest.mark.parametrize(
    "make",
    [
        casts_outside_of_the_scan,
        slow(remat_and_casts_inside),
    ],
)
def test_cutting_changes_no_value_of_low_precision(make: Callable[[], Case]):
    """With one microbatch nothing is summed in another order."""
    assert_like_the_full_batch(make(), of_single_devices(2, 1), rtol=1e-6)


def test_residuals_hold_no_parameters():
    """Weights of rematerialised layers are read where they lie."""

    @jax.checkpoint
    def body(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)), None

    def predict(params: Any, batch: Any) -> Any:
        x, _ = lax.scan(body, batch["x"] @ params["in"], params["w"])
        return x @ params["out"], 0.0

    params = {name: x for name, x in stack(4).items() if name != "b"}
    case = training(predict, params, optax.sgd(0.01))
    _, pipeline = assert_like_the_full_batch(case, of_single_devices(2, 2))
    kept = [
        pipeline.planned.types[name].shape
        for name, slot in pipeline.program.slots.items()
        if slot.kind == "activation"
    ]
    assert (2, 4, 4, WIDTH) in kept  # what layers made of a microbatch
    assert (2, WIDTH, WIDTH) not in kept


def test_a_value_for_each_layer_is_one_array():
    fun, state, inputs = plain(3, optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        state, value = fun(state, batch)
        return state, (value, jnp.abs(state[0]["w"]).max((1, 2)))

    pipelined = parallelize(step, method=of_single_devices(2, 2))
    expected = jax.jit(step)(jax.device_get(state), inputs)[1][1]
    largest = pipelined(state, inputs)[1][1]
    assert isinstance(largest, jax.Array)
    np.testing.assert_allclose(largest, expected, rtol=2e-4)


def test_a_scan_over_time_stays_whole():
    """Its slices are of the batch: all steps read the same weights."""

    def predict(params: Any, batch: Any) -> Any:
        def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(x @ params["in"] + state @ params["out"])
            return state, state

        start = jnp.zeros((batch["x"].shape[0], WIDTH))
        _, states = lax.scan(cell, start, batch["x"].swapaxes(0, 1))
        return states.swapaxes(0, 1) @ params["head"], 0.0

    params = {name: normal(i, WIDTH, WIDTH) for i, name in enumerate(["in", "out"])}
    case = training(predict, {**params, "head": normal(3, WIDTH, WIDTH)})
    pipeline = lowered(case, of_single_devices(2, 2))
    assert not any(pipeline.chunked.input_lengths)


def test_an_update_that_needs_the_whole_stack_is_refused():
    fun, state, inputs = plain(4)

    def step(state: Any, batch: Any) -> Any:
        (params, opt_state), value = fun(state, batch)
        order = jnp.argsort(params["b"], axis=0)
        params["b"] = jnp.take_along_axis(params["b"], order, axis=0)
        return (params, opt_state), value

    pipelined = parallelize(step, method=of_single_devices(2, 2))
    with pytest.raises(NotImplementedError, match="meet in the update"):
        pipelined(state, inputs)
