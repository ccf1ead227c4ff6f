"""Semi-supervised: 8 labelled and 24 unlabelled examples go through one model.

Asked: both are cut by num_microbatches=4 (2 and 6 at a time) and by two stages, given as
one argument, as two, joined by the step, or named with batch_argnums.
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
batches = [
    ({"x": floats(8, 8), "y": floats(8, 4)}, {"x": floats(24, 8)}) for _ in range(3)
]


def net(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["m"]) @ p["b"]


def make(is_joined):
    def step(p, few, many):
        def loss(p):
            if is_joined:
                both = net(p, jnp.concatenate([few["x"], many["x"]]))
                left, right = both[:8], both[8:]
            else:
                left, right = net(p, few["x"]), net(p, many["x"])
            return jnp.mean((left - few["y"]) ** 2) + 0.1 * jnp.mean(jnp.abs(right))

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    return step


def run(step):
    p = jax.tree.map(jnp.array, weights)
    for pair in batches:
        p, value = step(p, *pair)
    return jax.tree.leaves(jax.device_get((p, value)))


wrong = []
stages = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
options = {
    "microbatches": {"num_microbatches": 4, "mesh": "x:8"},
    "microbatches named": {
        "num_microbatches": 4,
        "mesh": "x:8",
        "batch_argnums": (1, 2),
    },
    "stages": {"method": stages},
    "stages named": {"method": stages, "batch_argnums": (1, 2)},
}
for is_joined in (False, True):
    expected = run(jax.jit(make(is_joined)))
    for name, option in options.items():
        case = f"{'joined' if is_joined else 'apart'}/{name}"
        try:
            found = run(autopar.parallelize(make(is_joined), **option))
        except Exception as error:
            wrong.append(f"{case} {type(error).__name__}")
            continue
        if not all(
            np.allclose(a, b, rtol=2e-4, atol=1e-6) for a, b in zip(found, expected)
        ):
            wrong.append(f"{case} differs")
print("unlike batch sizes:", "; ".join(wrong) or "right")
sys.exit(bool(wrong))
