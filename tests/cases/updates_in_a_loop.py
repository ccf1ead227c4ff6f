"""Several updates in one call: a scan of the train step over 5 batches of 16 examples.

Asked: num_microbatches=4 cuts the batch of each update (dim 1 of the argument), or what
is said names the loop over updates. Today: "none was found ... name them with
batch_argnums", and naming them cuts the steps instead of the examples.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import sys

import jax
import jax.numpy as jnp
import numpy as np

import autopar

random = np.random.default_rng(0)


def floats(*shape):
    return jnp.asarray(random.standard_normal(shape) * 0.3, jnp.float32)


weights = {"a": floats(8, 16), "b": floats(16, 16), "c": floats(16, 4)}
batches = [{"x": floats(5, 16, 8), "y": floats(5, 16, 4)} for _ in range(2)]


def update(p, b):
    def loss(p):
        return jnp.mean(
            (jnp.tanh(jnp.tanh(b["x"] @ p["a"]) @ p["b"]) @ p["c"] - b["y"]) ** 2
        )

    value, gradients = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value


def step(p, several):
    return jax.lax.scan(update, p, several)


def run(step):
    p = jax.tree.map(jnp.array, weights)
    for b in batches:
        p, value = step(p, b)
    return jax.tree.leaves(jax.device_get((p, value)))


wrong = []
expected = run(jax.jit(step))
for name, option in {
    "shards": {"mesh": "x:8"},
    "microbatches": {"num_microbatches": 4, "mesh": "x:8"},
    "stages": {"method": autopar.PipelineParallel(num_stages=2, num_microbatches=4)},
}.items():
    try:
        found = run(autopar.parallelize(step, **option))
    except Exception as error:
        is_clear = any(
            word in str(error) for word in ("updates", "steps", "loop", "scan")
        )
        wrong.append(f"{name} {type(error).__name__}{'' if is_clear else ', unclear'}")
        continue
    if not all(
        np.allclose(a, b, rtol=2e-4, atol=1e-6) for a, b in zip(found, expected)
    ):
        wrong.append(f"{name} differs")
print("updates in a loop:", "; ".join(wrong) or "right")
sys.exit(bool(wrong))
