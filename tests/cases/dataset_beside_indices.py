"""A dataset lies on the devices, whole; the batch is 16 indices into it.

Asked: what is cut into microbatches is the indices. Found by leading sizes, the dataset
is taken: microbatches change nothing (a warning), a pipeline is refused with words that
do not name batch_argnums; with both in one dict no option helps.
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


weights = {"a": floats(8, 12), "m": floats(12, 12), "b": floats(12, 4)}
data = floats(1000, 8)
picks = [jnp.asarray(random.integers(0, 1000, 16)) for _ in range(3)]


def update(p, x):
    def loss(p):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["m"]) @ p["b"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value


forms = {
    "arguments": (lambda p, data, i: update(p, data[i]), lambda i: (data, i)),
    "dict": (
        lambda p, b: update(p, b["data"][b["i"]]),
        lambda i: ({"data": data, "i": i},),
    ),
}


def run(step, given):
    p = jax.tree.map(jnp.array, weights)
    for i in picks:
        p, value = step(p, *given(i))
    return jax.tree.leaves(jax.device_get((p, value)))


wrong = []
stages = {"method": autopar.PipelineParallel(num_stages=2, num_microbatches=4)}
for form, (step, given) in forms.items():
    expected = run(jax.jit(step), given)
    for name, option in {
        "stages": stages,
        "stages named": stages | {"batch_argnums": 2},
    }.items():
        if form == "dict" and "named" in name:
            continue
        try:
            found = run(autopar.parallelize(step, **option), given)
        except Exception as error:
            wrong.append(f"{form}/{name} {type(error).__name__}")
            continue
        if not all(
            np.allclose(a, b, rtol=2e-4, atol=1e-6) for a, b in zip(found, expected)
        ):
            wrong.append(f"{form}/{name} differs")
print("dataset beside indices:", "; ".join(wrong) or "right")
sys.exit(bool(wrong))
