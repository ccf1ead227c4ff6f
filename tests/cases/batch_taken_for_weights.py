"""The only batch {"x", "y"} of a step is taken for frozen weights.

Where work on the whole batch (cumsum, sort, median over examples) makes one operand of a
product that sums over examples, the other operand, the examples, is thought a weight:
experts with capacities, soft assignment by Sinkhorn, a kernel's inverse. Asked: named
methods (DataParallel, Zero) run as jit does; microbatches either run or say which
operator needs all examples, not that there is no batch.
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


def experts(p, x):
    """Top-1 of 4 experts with room for 6 of 16 examples each, in order of arrival."""
    chance = jax.nn.softmax(x @ p["route"])
    chosen = jax.nn.one_hot(chance.argmax(-1), 4)
    place = jnp.cumsum(chosen, 0) * chosen - 1
    sent = jax.nn.one_hot(place.astype(int), 6) * chosen[..., None]
    inside = jnp.einsum("nec,nd->ecd", sent, x)
    out = jax.nn.relu(jnp.einsum("ecd,edf->ecf", inside, p["experts"]))
    return jnp.einsum("ecf,nec,ne->nf", out, sent, chance)


def assignment(p, x):
    """Centroids of a soft assignment that is balanced over the batch."""
    scores = x @ p["route"]
    for _ in range(3):
        scores = scores - jax.nn.logsumexp(scores, 0)
        scores = scores - jax.nn.logsumexp(scores, 1, keepdims=True)
    shares = jnp.exp(jax.lax.stop_gradient(scores))
    return x @ p["experts"][0] + shares @ (shares.T @ x)


def kernel(p, x):
    """Smoothed by a kernel whose width is the median distance."""
    z = x @ p["experts"][0]
    apart = ((z[:, None] - z[None]) ** 2).sum(-1)
    near = jnp.exp(-apart / jax.lax.stop_gradient(jnp.median(apart)))
    return jnp.linalg.solve(near + jnp.eye(16), x) + near @ x


wrong = []
batches = [{"x": floats(16, 8), "y": floats(16, 8)} for _ in range(3)]
for model in (experts, assignment, kernel):

    def step(p, b):
        def loss(p):
            return jnp.mean((b["x"] + model(p, b["x"]) - b["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    weights = {"route": floats(8, 4), "experts": floats(4, 8, 8)}

    def run(step):
        p = jax.tree.map(jnp.array, weights)
        for b in batches:
            p, value = step(p, b)
        return jax.tree.leaves(jax.device_get((p, value)))

    expected = run(jax.jit(step))
    for name, option in {
        "DataParallel": {"method": autopar.DataParallel()},
        "Zero": {"method": autopar.Zero(3)},
        "microbatches": {"num_microbatches": 4},
    }.items():
        case = f"{model.__name__}/{name}"
        try:
            found = run(autopar.parallelize(step, mesh="x:8", **option))
        except autopar.BatchCoupledError:
            continue  # it says which operator needs all examples
        except Exception as error:
            wrong.append(f"{case} {type(error).__name__}")
            continue
        if not all(
            np.allclose(a, b, rtol=5e-4, atol=1e-5) for a, b in zip(found, expected)
        ):
            wrong.append(f"{case} differs")
print("batch taken for weights:", "; ".join(wrong) or "right")
sys.exit(bool(wrong))
