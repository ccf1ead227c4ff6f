"""Pipelines from unmodified steps: the state of the whole-batch step, audited."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.api import parallelize
from autopar.methods import PipelineParallel
from autopar.microbatches import BatchCoupledError
from benchmarks.models import build


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * 0.3


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


def multilayer_perceptron() -> tuple[Callable[..., Any], Any, Any]:
    workload = build("mlp", optimizer="adamw_clip")
    return workload.step, workload.init(jax.random.key(0)), workload.make_batch(0)


def audits(step: Any) -> list[Any]:
    (pipelined,) = step._pipelines.values()
    return list(pipelined.pipeline.audit())


CASES = [
    (multilayer_perceptron, 2, 1, "gpipe"),
    (multilayer_perceptron, 4, 4, "1f1b"),
    (tied_language_model, 2, 4, "1f1b"),
    (encoder_decoder, 2, 4, "1f1b"),
    (encoder_decoder, 4, 2, "gpipe"),
]


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
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert all(each.ok for each in audits(step))


def test_every_stage_holds_only_its_own_parameters():
    fun, state, batch = multilayer_perceptron()
    step = parallelize(fun, method=PipelineParallel(num_stages=2, num_microbatches=2))
    new_state, _ = step(state, batch)
    kernels = [layer["kernel"] for layer in new_state.params["layers"]]
    stages = [min(d.id for d in kernel.devices()) // 4 for kernel in kernels]
    assert stages == sorted(stages) and set(stages) == {0, 1}
    assert all(len(kernel.devices()) == 4 for kernel in kernels)


def test_a_stage_may_be_split_over_several_axes():
    fun, state, batch = multilayer_perceptron()
    method = PipelineParallel(num_stages=2, num_microbatches=2)
    step = parallelize(fun, method=method, mesh="data:2;model:2")
    expected, _ = jax.jit(fun)(state, batch)
    got, _ = step(state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_more_stages_than_products_are_refused():
    step = parallelize(
        lambda w, x: (w - (x @ w).mean(), x.sum()),
        method=PipelineParallel(num_stages=8, num_microbatches=1),
        batch_argnums=(1,),
    )
    with pytest.raises(ValueError, match="at most the number of products"):
        step(jnp.eye(8), jnp.ones((8, 8)))


def test_stages_must_divide_the_devices():
    fun, state, batch = multilayer_perceptron()
    step = parallelize(fun, method=PipelineParallel(num_stages=3, num_microbatches=1))
    with pytest.raises(ValueError, match="3 stages and 8 devices"):
        step(state, batch)


def test_batch_norm_is_refused():
    workload = build("resnet")
    step = parallelize(workload.step, method=PipelineParallel(2, 2))
    with pytest.raises(BatchCoupledError, match="batch_norm"):
        step(workload.init(jax.random.key(0)), workload.make_batch(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_stages=0), "`num_stages` must be a whole number"),
        (dict(num_stages=2, num_microbatches=-1), "`num_microbatches` must be"),
        (dict(num_stages=2, schedule="2f2b"), "must be one of 1f1b, gpipe"),
    ],
)
def test_bad_options_name_the_rule(options, message):
    with pytest.raises(ValueError, match=message):
        parallelize(lambda x: x, method=PipelineParallel(**options))
