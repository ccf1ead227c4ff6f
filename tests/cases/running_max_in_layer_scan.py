"""Delayed scaling: a max over the batch, made in a scan over layers, is next state.

Asked: num_microbatches=4 and two stages give what jit gives. A list of layers is cut (by
keeping all activations until the loop is over); a scan over the same layers is refused,
and so is a pipeline of either.  Kinds: amax histories of fp8, calibration statistics.
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
weights = jnp.asarray(random.standard_normal((2, 16, 16)) * 0.2, jnp.float32)
batches = [
    jnp.asarray(random.standard_normal((16, 16)) * (1 + i), jnp.float32)
    for i in range(3)
]


def make(is_scan):
    def layer(h, w):
        return jnp.tanh(h @ w) + h, jnp.max(jnp.abs(jax.lax.stop_gradient(h)))

    def step(state, x):
        def loss(w):
            if is_scan:
                h, found = jax.lax.scan(layer, x, w)
            else:
                h, parts = x, []
                for i in range(2):
                    h, part = layer(h, w[i])
                    parts.append(part)
                found = jnp.stack(parts)
            return jnp.mean(h**2), found

        (value, found), gradient = jax.value_and_grad(loss, has_aux=True)(state["w"])
        history = jnp.roll(state["amax"], 1, 1).at[:, 0].set(found)
        return {"w": state["w"] - 0.1 * gradient, "amax": history}, value

    return step


def run(step):
    state = {"w": jnp.array(weights), "amax": jnp.ones((2, 4))}
    for x in batches:
        state, value = step(state, x)
    return jax.tree.leaves(jax.device_get((state, value)))


wrong = []
options = {
    "microbatches": {"num_microbatches": 4, "mesh": "x:8"},
    "stages": {"method": autopar.PipelineParallel(num_stages=2, num_microbatches=4)},
}
for form in (False, True):
    expected = run(jax.jit(make(form)))
    for name, option in options.items():
        case = f"{'scan' if form else 'list'}/{name}"
        try:
            found = run(autopar.parallelize(make(form), **option))
        except Exception as error:
            wrong.append(f"{case} {type(error).__name__}")
            continue
        if not all(
            np.allclose(a, b, rtol=2e-4, atol=1e-6) for a, b in zip(found, expected)
        ):
            wrong.append(f"{case} differs")
print("running max:", "; ".join(wrong) or "right")
sys.exit(bool(wrong))
