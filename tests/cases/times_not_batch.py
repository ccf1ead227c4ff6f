"""A step(times, ys, params): times float[20] is shared by all examples, ys float[16, 20, 2] is the batch.

Which argument is the batch is a tie between the sizes 20 and 16, and the larger one is taken (frontend/roles.py,
_batch_leaves). Right: pipelining works as when batch_argnums=1 is named, or the refusal says that `times` was taken for
the batch and names batch_argnums. (A neural ODE: every example is integrated over the same times.)
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import sys

import autopar
import jax
import jax.numpy as jnp
import numpy as np


def step(times, ys, params):
    def loss_of(params):
        def one(y0, y):
            def euler(state, _):
                t, z = state
                dt = jnp.minimum(times[1] - times[0], times[-1] - t)
                z = z + dt * (jnp.tanh(z @ params["in"]) @ params["out"])
                return (t + dt, z), z

            path = jax.lax.scan(
                euler, (times[0], y0 @ params["first"]), None, y.shape[0]
            )[1]
            return jnp.mean((path @ params["last"] - y) ** 2)

        return jnp.mean(jax.vmap(one)(ys[:, 0], ys))

    loss, grads = jax.value_and_grad(loss_of)(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


rng = np.random.default_rng(0)
f = lambda *s: jnp.asarray(rng.standard_normal(s) / 4, jnp.float32)
params = {"first": f(2, 8), "in": f(8, 32), "out": f(32, 8), "last": f(8, 2)}
times, ys = jnp.linspace(0.0, 1.0, 20), f(16, 20, 2)
expected = jax.jit(step)(times, ys, params)
wrong = []
for name, options in {
    "PipelineParallel(2, 4)": dict(method=autopar.PipelineParallel(2, 4)),
    "DataParallel()": dict(method=autopar.DataParallel()),
}.items():
    try:
        got = autopar.parallelize(step, **options)(
            times, ys, jax.tree.map(jnp.array, params)
        )
        if not all(
            np.allclose(a, b, rtol=1e-4, atol=1e-6)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected))
        ):
            wrong.append(f"{name}: values differ")
    except Exception as error:
        if "batch_argnums" not in str(error):
            wrong.append(
                f"{name}: {type(error).__name__} without a word on batch_argnums: {str(error)[:220]}"
            )
print("FAIL " + "; ".join(wrong) if wrong else "ok")
sys.exit(bool(wrong))
