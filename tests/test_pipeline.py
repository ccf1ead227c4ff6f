"""Pipelines from unmodified steps: the state of the whole-batch step, audited."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from autopar.microbatches.microbatches import BatchCoupledError
from benchmarks.models import build
from tests import random_arrays
from tests.marks import slow

normal = partial(random_arrays.normal, scale=0.3)


def encoder_decoder() -> tuple[Callable[..., Any], Any, Any]:
    """Cross-attention: what the encoder made is read by every decoder layer."""
    params = {
        "enc": [normal(i, 32, 32) for i in range(2)],
        "dec": [
            {"q": normal(10 + i, 32, 32), "o": normal(20 + i, 32, 32)} for i in (0, 1)
        ],
        "head": normal(30, 32, 16),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-4))

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss(params: Any) -> jax.Array:
            memory = batch["source"]
            for kernel in params["enc"]:
                memory = memory + jnp.tanh(memory @ kernel)
            x = batch["target"]
            for layer in params["dec"]:
                scores = jnp.einsum("bth,bsh->bts", x @ layer["q"], memory)
                x = x + jax.nn.softmax(scores) @ memory @ layer["o"]
            labels = jnp.arange(x.shape[1])[None, :] % 16
            losses = optax.softmax_cross_entropy_with_integer_labels(
                x @ params["head"], jnp.broadcast_to(labels, x.shape[:2])
            )
            return (losses * batch["mask"]).sum() / batch["mask"].sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        norm = optax.tree_utils.tree_norm(grads)
        return (optax.apply_updates(params, updates), opt_state), (value, norm)

    batch = {
        "source": normal(40, 16, 6, 32),
        "target": normal(41, 16, 4, 32),
        "mask": (normal(42, 16, 4) > -0.2).astype(jnp.float32),
    }
    return step, (params, optimizer.init(params)), batch


def tied_language_model() -> tuple[Callable[..., Any], Any, Any]:
    """The embedding is read by the first stage and by the last."""
    params = {"embed": normal(0, 32, 64), "hidden": [normal(i, 64, 64) for i in (1, 2)]}

    def step(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["embed"][tokens]
            for kernel in params["hidden"]:
                x = x + jnp.tanh(x @ kernel)
            log_probs = jax.nn.log_softmax(x @ params["embed"].T)
            return -jnp.take_along_axis(log_probs, tokens[..., None], -1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, params, jax.random.randint(jax.random.key(9), (16, 4), 0, 32)


def chain(num_layers: int = 4, size: int = 32) -> tuple[Any, Any, Any]:
    """Tanh layers, and a mean of squares."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = x
            for w in params["w"]:
                y = jnp.tanh(y @ w)
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return (
        step,
        {"w": [normal(i, size, size) for i in range(num_layers)]},
        normal(9, 16, size),
    )


def tied_gpt() -> tuple[Callable[..., Any], Any, Any]:
    workload = build("gpt", optimizer="sgd", tied=True)
    return workload.step, workload.init(jax.random.key(0)), workload.make_batch(0)


def multilayer_perceptron() -> tuple[Callable[..., Any], Any, Any]:
    workload = build("mlp", num_layers=2, optimizer="sgd")
    return workload.step, workload.init(jax.random.key(0)), workload.make_batch(0)


def audits(step: Any) -> list[Any]:
    (pipelined,) = step._running()
    return list(pipelined.pipeline.audit())


def assert_equal(got: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


CASES = [
    (multilayer_perceptron, 2, 1, "gpipe"),
    (tied_language_model, 2, 4, "1f1b"),
    (encoder_decoder, 2, 4, "1f1b"),
    (encoder_decoder, 4, 2, "gpipe"),
    (tied_gpt, 2, 4, "1f1b"),
    (encoder_decoder, 4, 8, "zb_h2"),
    (tied_gpt, 2, 4, "zb_h1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_stages", "num_microbatches", "schedule"), CASES)
def test_the_whole_state_equals_the_full_batch_step(
    model: Any, num_stages: int, num_microbatches: int, schedule: str
):
    fun, state, batch = model()
    reference = jax.jit(fun)
    method = PipelineParallel(num_stages, num_microbatches, schedule)
    step: Any = parallelize(fun, method=method)
    expected: Any = (state, None)
    got: Any = expected
    for _ in range(3):
        expected = reference(expected[0], batch)
        got = step(got[0], batch)
    assert_equal(got, expected)
    assert all(each.ok for each in audits(step))


def test_a_stage_of_several_axes_holds_only_its_own_parameters():
    fun, state, batch = multilayer_perceptron()
    method = PipelineParallel(num_stages=2, num_microbatches=1, schedule="gpipe")
    step: Any = parallelize(fun, method=method, mesh="data:2;model:2")
    expected, _ = jax.jit(fun)(state, batch)
    got, _ = step(state, batch)
    assert_equal(got, expected)
    assert all(each.ok for each in audits(step))
    kernels = [layer["kernel"] for layer in got.params["layers"]]
    stages = [min(d.id for d in kernel.devices()) // 4 for kernel in kernels]
    assert stages == sorted(stages) and set(stages) == {0, 1}
    assert all(len(kernel.devices()) == 4 for kernel in kernels)


def test_more_stages_than_products_are_refused():
    step: Any = parallelize(
        lambda w, x: (w - (x @ w).mean(), x.sum()),
        method=PipelineParallel(num_stages=8, num_microbatches=1),
        batch_argnums=(1,),
    )
    with pytest.raises(ValueError, match="at most the number of products"):
        step(jnp.eye(8), jnp.ones((8, 8)))


def test_batch_norm_is_refused():
    def batch_norm(y: jax.Array) -> jax.Array:
        return (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5)

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.tanh(batch_norm(x @ w) @ w).mean())(w)

    step: Any = parallelize(fun, method=PipelineParallel(2, 2), batch_argnums=1)
    with pytest.raises(BatchCoupledError, match="batch_norm"):
        step.plan(normal(0, 8, 8), normal(1, 16, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_stages=0), "`num_stages` must be a whole number"),
        (dict(num_stages=1), r"two stages or more.*autopar\.ShardParallel"),
        (dict(num_stages=2, num_microbatches=-1), "`num_microbatches` must be"),
        (dict(num_stages=2, schedule="1b1f"), "but got '1b1f'; use '1f1b'"),
        (dict(num_stages=2, schedule="GPipe"), "but got 'GPipe'; use 'gpipe'"),
        (dict(num_stages=4, schedule="interleaved"), "stages_per_submesh=1; use"),
        (dict(num_stages=4, stages_per_submesh=2), "schedule='interleaved'"),
        (
            dict(num_stages=4, schedule="interleaved", stages_per_submesh=3),
            "must divide `num_stages`, which is 4, but got 3",
        ),
        (
            dict(num_stages=2, schedule="interleaved", stages_per_submesh=2),
            "2 stages share one",
        ),
        (
            dict(
                num_stages=4,
                num_microbatches=3,
                schedule="interleaved",
                stages_per_submesh=2,
            ),
            "3 is no multiple of 2; use num_microbatches=4",
        ),
        (dict(num_stages=2, stage_meshes=["x:4"]), "each of 2 submeshes, but got 1"),
        (dict(num_stages=2, microbatch_semantics="other"), "but got 'other'"),
    ],
)
def test_bad_options_name_rule_value_and_remedy(options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        parallelize(lambda x: x, method=PipelineParallel(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_stages=16), "16 submeshes and 8 devices; use at most num_stages=8"),
        (
            dict(num_stages=3, stage_products=(1, 1, 1)),
            r"cannot be to 3 submeshes; say how with `stage_meshes`, such as \[",
        ),
        (dict(num_stages=2, stage_meshes=["x:8", "x:2"]), "need 10 and there are 8"),
        (dict(num_stages=2, num_microbatches=3), "but got 3; use 2 or 4"),
    ],
)
def test_what_does_not_fit_devices_or_batch_is_refused(options: Any, message: str):
    fun, state, batch = tied_language_model()
    step: Any = parallelize(fun, method=PipelineParallel(**options), batch_argnums=1)
    with pytest.raises(ValueError, match=message):
        step.plan(state, batch)


def test_the_number_of_microbatches_is_given_once():
    method = PipelineParallel(num_stages=2, num_microbatches=4)
    with pytest.raises(ValueError, match="`num_microbatches` is 2, but the method is"):
        parallelize(lambda x: x, method=method, num_microbatches=2)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        (
            tied_language_model,
            PipelineParallel(3, 2, stage_meshes=["x:4", "a:2;b:1", "x:2"]),
        ),
        slow(
            chain,
            PipelineParallel(4, 4, "interleaved", stages_per_submesh=2),
        ),
        slow(
            tied_language_model,
            PipelineParallel(2, 4, stage_meshes=["a:2;b:2", "c:4"]),
        ),
    ],
    ids=["unequal", "interleaved", "other_shapes"],
)
def test_submeshes_may_differ_or_hold_several_stages(model: Any, method: Any):
    fun, state, batch = model()
    step: Any = parallelize(fun, method=method)
    expected: Any = (state, None)
    got: Any = (jax.tree.map(jnp.copy, state), None)
    for _ in range(2):
        expected, got = jax.jit(fun)(expected[0], batch), step(got[0], batch)
    assert_equal(got, expected)
    assert all(each.ok for each in audits(step))
    compiled = step.lower(state, batch)
    sizes = [p.planned.plan.mesh.size for p in compiled.step.pipeline.lowered]
    assert set(sizes) == ({4, 2} if method.num_stages == 3 else {4})


def test_the_two_sides_of_a_boundary_may_be_pinned_to_differing_specs():
    """Examples are split on the first stage, and columns of kernels on the second."""
    fun, params, x = chain()
    x = jnp.tile(x, (8, 1))  # or gathering x would cost less than reducing gradients
    pins = {"x": P("a"), "params['w'][0]": P(), "params['w'][1]": P()}
    pins |= {"params['w'][2]": P(None, "a"), "params['w'][3]": P("a")}
    method = PipelineParallel(2, 2)
    step: Any = parallelize(fun, method=method, mesh="a:4", pins=pins)
    expected = jax.jit(fun)(params, x)
    compiled = step.lower(params, x).compile()
    compiled.audit().raise_if_wrong()
    (sent,) = [t for t in compiled.plan.stages.transfers if t.source == 0]
    planned = compiled.lowered.step.pipeline.planned
    assert planned.specs[sent.slot, 0] != planned.specs[sent.slot, 1]
    new_params, loss = step(params, x)
    specs = [w.sharding.spec for w in new_params["w"]]
    assert specs == [P(), P(), P(None, "a"), P("a")]
    assert_equal((new_params, loss), expected)


def test_two_stages_are_busy_at_once():
    """A recorded step: runs are waited for, and those of two submeshes overlap."""
    fun, params, x = chain(size=512)
    x = jnp.tile(x, (64, 1))
    step: Any = parallelize(fun, method=PipelineParallel(2, 4))
    params, _ = step(params, x)
    (pipelined,) = step._running()
    pieces = pipelined.pipeline.split([*params["w"], x])
    batch = pipelined.pipeline.batch_of(pieces)
    state = pipelined.pipeline.state_of(pieces)
    _, _, timeline = pipelined.execute.record(state, batch)
    by_submesh = [[e for e in timeline.events if e.submesh == i] for i in (0, 1)]
    overlaps = [
        (str(a.task), str(b.task))
        for a in by_submesh[0]
        for b in by_submesh[1]
        if min(a.end, b.end) > max(a.start, b.start)
    ]
    assert overlaps, str(timeline)
    order = ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3", "0A"]
    assert list(dict.fromkeys(str(e.task) for e in by_submesh[0])) == order
