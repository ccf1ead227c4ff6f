"""optax.MultiSteps under PipelineParallel(2, 4) with a metric of the accumulated gradients, as nanodo logs it.

The metric reads the gradients of both stages and opt_state.acc_grads: acc + (grad - acc) / (mini_step + 1). It is an
update-side statistic, not a derivative of a derivative. Right: equal to plain jit, or a refusal that says what it is.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import sys

import autopar
import jax
import jax.numpy as jnp
import numpy as np
import optax

optimizer = optax.MultiSteps(optax.adam(1e-3), 1)


def step(params, opt_state, x, y):
    def loss_of(params):
        for w in params:
            x_ = jnp.tanh((x if w is params[0] else x_) @ w["w"] + w["b"])
        return jnp.mean((x_ - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, new_state = optimizer.update(grads, opt_state, params)
    acc = jax.tree.map(
        lambda a, g: a + (g - a) / (opt_state.mini_step + 1), opt_state.acc_grads, grads
    )
    means = jax.tree.map(
        jnp.mean, acc
    )  # a linear statistic: with jnp.sqrt(jnp.mean(g**2)) alone it works
    return optax.apply_updates(params, updates), new_state, loss, means


rng = np.random.default_rng(0)
f = lambda *s: jnp.asarray(rng.standard_normal(s) / 6, jnp.float32)
params = [{"w": f(32, 32), "b": jnp.zeros(32)} for _ in range(4)]
state = optimizer.init(params)
x, y = f(16, 32), f(16, 32)
expected = jax.jit(step)(params, state, x, y)
copy = lambda t: jax.tree.map(jnp.array, t)
try:
    got = autopar.parallelize(step, method=autopar.PipelineParallel(2, 4))(
        copy(params), copy(state), x, y
    )
except Exception as error:
    print(f"FAIL {type(error).__name__}: {str(error)[:400]}")
    sys.exit(1)
same = all(
    np.allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected))
)
print("ok" if same else "FAIL values differ")
sys.exit(not same)
