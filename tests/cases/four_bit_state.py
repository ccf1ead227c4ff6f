"""A frozen base of 4 (and 2) bits comes back with the state; the second call crashes.

Asked: three steps as jit runs them, for every dtype below a byte, in one program, in
microbatches and on stages. (Programs compiled ahead of time by JAX itself refuse these
arrays the same way: the layouts that results tell lack the size of their elements.)
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


whole = jnp.asarray(random.integers(-2, 2, (32, 32)), jnp.float32)
trained = {"down": floats(32, 4), "up": floats(4, 32), "out": floats(32, 3)}
batches = [{"x": floats(16, 32), "y": floats(16, 3)} for _ in range(3)]


def step(state, b):
    def loss(t):
        base = state["base"].astype(jnp.float32) / 8
        h = jax.nn.relu(b["x"] @ base + b["x"] @ t["down"] @ t["up"])
        return jnp.mean((h @ t["out"] - b["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["t"])
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state["t"], gradients)
    return {"base": state["base"], "t": new}, value


def run(step, dtype):
    base = jnp.abs(whole) if dtype.startswith("u") else whole
    state = {"base": base.astype(dtype), "t": jax.tree.map(jnp.array, trained)}
    for b in batches:
        state, value = step(state, b)
    return jax.tree.leaves(jax.device_get((state["t"], value)))


wrong = []
for dtype in ("int8", "int4", "uint4", "int2", "float4_e2m1fn"):
    expected = run(jax.jit(step), dtype)
    for name, option in {
        "shards": {"mesh": "x:8"},
        "microbatches": {"num_microbatches": 4, "mesh": "x:8"},
        "stages": {
            "method": autopar.PipelineParallel(num_stages=2, num_microbatches=4)
        },
    }.items():
        try:
            found = run(autopar.parallelize(step, **option), dtype)
        except Exception as error:
            wrong.append(f"{dtype}/{name} {type(error).__name__}")
            continue
        if not all(
            np.allclose(a, b, rtol=2e-4, atol=1e-6) for a, b in zip(found, expected)
        ):
            wrong.append(f"{dtype}/{name} differs")
print("four-bit state:", "; ".join(wrong) or "right")
sys.exit(bool(wrong))
