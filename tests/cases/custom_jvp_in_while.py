"""A custom_jvp function with nondiff_argnums and an optional array argument that is None, inside a while loop and a cond
(a Sinkhorn loop). JAX's debug info names more arguments than the jaxpr has; plain jit never looks. Right: equal to jit."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import functools
import sys

import autopar
import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 4))
def soft_max(x, axis=None, keepdims=False, scale=None, signed=False):
    return jax.scipy.special.logsumexp(x, axis=axis, keepdims=keepdims, b=scale)


@soft_max.defjvp
def soft_max_jvp(axis, keepdims, signed, primals, tangents):
    (x, scale), (dx, _) = primals, tangents
    out = soft_max(x, axis, keepdims, scale, signed)
    return out, jnp.sum(jnp.exp(x - jnp.expand_dims(out, axis)) * dx, axis=axis)


def step(params, x, y):
    def potentials(cost):
        def body(carry):
            f, g, i, _ = carry
            g = -soft_max(f[:, None] - cost, axis=0)
            f = -soft_max(g[None, :] - cost, axis=1)
            error = jax.lax.cond(
                i % 5 == 4,
                lambda: jnp.sum(
                    jnp.abs(
                        jnp.exp(soft_max(f[:, None] + g[None, :] - cost, axis=0)) - 1
                    )
                ),
                lambda: jnp.float32(jnp.inf),
            )
            return f, g, i + 1, error

        start = (
            jnp.zeros(cost.shape[0]),
            jnp.zeros(cost.shape[1]),
            0,
            jnp.float32(jnp.inf),
        )
        return jax.lax.while_loop(lambda c: (c[2] < 20) & (c[3] > 1e-3), body, start)[
            :2
        ]

    def loss_of(params):
        moved = jnp.tanh(x @ params["a"]) @ params["b"]
        cost = jnp.sum((moved[:, None] - y[None]) ** 2, -1)
        f, g = jax.lax.stop_gradient(potentials(jax.lax.stop_gradient(cost)))
        return jnp.mean(jnp.exp(f[:, None] + g[None, :] - cost) * cost)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


rng = np.random.default_rng(0)
f = lambda *s: jnp.asarray(rng.standard_normal(s) / 3, jnp.float32)
params, x, y = {"a": f(4, 32), "b": f(32, 4)}, f(32, 4), f(32, 4)
expected = jax.jit(step)(params, x, y)
try:
    got = autopar.parallelize(step)(jax.tree.map(jnp.array, params), x, y)
except Exception as error:
    print(f"FAIL {type(error).__name__}: {str(error)[:250]}")
    sys.exit(1)
same = all(
    np.allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected))
)
print("ok" if same else "FAIL values differ")
sys.exit(not same)
