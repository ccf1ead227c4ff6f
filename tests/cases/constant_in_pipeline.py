"""An already jitted step that writes `jnp.array([1])` (a mask built from it: [1, 0, 0, ...]), under PipelineParallel(2, 4).

It is planned, compiled and audited, then the first call raises "a step takes the batch slots of its program, but lacks
['constant[0]', ...]": the graph of a microbatch has constants that the graph of the step has not, and
pipelines/stage_programs.py makes slots of the batch of them. Without @jax.jit it works. Right: as plain jit.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import sys

import autopar
import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def step(params, x):
    def binned(v, knots):  # v in which of the bins; the first one if in none
        within = jnp.logical_and(v >= knots[:-1], v < knots[1:])
        first = jnp.concatenate([jnp.array([1]), jnp.zeros(len(within) - 1)]).astype(
            bool
        )
        within = jnp.where(jnp.any(within), within, first)
        return v * jnp.sum(within * knots[:-1]) + jnp.sum(within * knots[1:])

    def loss_of(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w["w"])
            h = jax.vmap(jax.vmap(binned))(h, (h @ w["k"]).reshape(h.shape[0], 32, 5))
        return jnp.mean(h**2)

    grads = jax.grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


rng = np.random.default_rng(0)
f = lambda *s: jnp.asarray(rng.standard_normal(s) / 6, jnp.float32)
params, x = [{"w": f(32, 32), "k": f(32, 160)} for _ in range(4)], f(16, 32)
expected = jax.jit(step)(params, x)
try:
    got = autopar.parallelize(step, method=autopar.PipelineParallel(2, 4))(
        jax.tree.map(jnp.array, params), x
    )
except Exception as error:
    print(f"FAIL {type(error).__name__}: {str(error)[:250]}")
    sys.exit(1)
same = all(
    np.allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected))
)
print("ok" if same else "FAIL values differ")
sys.exit(not same)
