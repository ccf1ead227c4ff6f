"""The gradient of a max pool (stride 1, as in the DP-SGD example of JAX; 2x2 with stride 2 is off by 2.4 as well): values
are right, the predicted peak is not, XLA on the CPU expands select_and_scatter_add. Right: compiled within 25%."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
import sys

import autopar
import jax
import jax.numpy as jnp
import numpy as np

DIMS = ("NHWC", "HWIO", "NHWC")


def pooled(h):
    return jax.lax.reduce_window(
        h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"
    )


def step(params, x, y):
    def loss_of(params, x, y):
        h = jax.nn.relu(
            jax.lax.conv_general_dilated(
                x[None], params["a"], (2, 2), "SAME", dimension_numbers=DIMS
            )
        )
        h = pooled(h)
        h = pooled(
            jax.nn.relu(
                jax.lax.conv_general_dilated(
                    h, params["b"], (2, 2), "VALID", dimension_numbers=DIMS
                )
            )
        )
        return -jax.nn.log_softmax(h.reshape(-1) @ params["c"])[y]

    grads = jax.grad(lambda p: jnp.mean(jax.vmap(loss_of, (None, 0, 0))(p, x, y)))(
        params
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


rng = np.random.default_rng(0)
f = lambda *s: jnp.asarray(rng.standard_normal(s) / 8, jnp.float32)
params = {"a": f(8, 8, 1, 16), "b": f(4, 4, 16, 32), "c": f(4 * 4 * 32, 10)}
x, y = f(64, 28, 28, 1), jnp.asarray(rng.integers(0, 10, 64), jnp.int32)
expected = jax.jit(step)(params, x, y)
parallel = autopar.parallelize(step)
audit = parallel.lower(params, x, y).compile().audit()
predicted = parallel.plan(params, x, y).predicted.peak_bytes
ratio = audit.memory.device_bytes / predicted
got = parallel(jax.tree.map(jnp.array, params), x, y)
same = all(
    np.allclose(a, b, rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected))
)
ok = same and audit.ok and 0.8 <= ratio <= 1.25
print(
    f"{'ok' if ok else 'FAIL'} values {'equal' if same else 'differ'}, memory compiled / predicted = {ratio:.2f} ({predicted:,} B predicted)"
)
sys.exit(not ok)
