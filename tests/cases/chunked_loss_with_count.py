"""Cross entropy in chunks of the sequence, divided by the number of tokens that count.

The scan over chunks carries the sum of losses and the count of unmasked tokens; the
labels alone tell the count. Asked: microbatches and stages give what jit gives, as they
do where the count is made outside of the scan. Kinds: count as float and as integer,
with and without jax.checkpoint.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import sys

import jax
import jax.numpy as jnp
import numpy as np

import autopar

EXAMPLES, TOKENS, CHUNK, WIDTH, WORDS = 16, 8, 4, 16, 40
random = np.random.default_rng(0)


def floats(*shape):
    return jnp.asarray(random.standard_normal(shape) * 0.3, jnp.float32)


def make_batch():
    words = random.integers(0, WORDS, (EXAMPLES, TOKENS))
    labels = np.roll(words, -1, 1)
    labels[random.random(labels.shape) < 0.4] = -100
    return {"words": jnp.asarray(words), "labels": jnp.asarray(labels)}


weights = {
    "table": floats(WORDS, WIDTH),
    "w": floats(WIDTH, WIDTH),
    "head": floats(WIDTH, WORDS),
}
batches = [make_batch() for _ in range(3)]


def make(dtype, is_remade, is_inside):
    def step(p, b):
        def loss(p):
            h = jnp.tanh(p["table"][b["words"]] @ p["w"])
            cut = lambda a: a.reshape(
                EXAMPLES, TOKENS // CHUNK, CHUNK, *a.shape[2:]
            ).swapaxes(0, 1)

            def body(carry, part):
                logits, labels = part[0] @ p["head"], part[1]
                counts = labels >= 0
                own = jnp.take_along_axis(
                    logits, jnp.where(counts, labels, 0)[..., None], -1
                )
                each = jax.nn.logsumexp(logits, -1) - own[..., 0]
                total = carry[0] + jnp.where(counts, each, 0.0).sum()
                return (total, carry[1] + counts.astype(dtype).sum()), None

            if is_remade:
                body = jax.checkpoint(body)
            zero = (jnp.float32(0), dtype(0))
            (total, count), _ = jax.lax.scan(body, zero, (cut(h), cut(b["labels"])))
            if not is_inside:
                count = (b["labels"] >= 0).sum()
            return total / jnp.maximum(count, 1)

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.5 * g, p, gradients), value

    return step


def run(step):
    p = jax.tree.map(jnp.array, weights)
    for b in batches:
        p, value = step(p, b)
    return jax.tree.leaves(jax.device_get((p, value)))


wrong = []
for form in (
    (jnp.float32, False, True),
    (jnp.int32, True, True),
    (jnp.float32, True, False),
):
    expected = run(jax.jit(make(*form)))
    for name, option in {
        "microbatches": {"num_microbatches": 4, "mesh": "x:8"},
        "stages": {
            "method": autopar.PipelineParallel(num_stages=2, num_microbatches=4)
        },
    }.items():
        case = f"{form[0].__name__}{' remade' * form[1]}{'' if form[2] else ' outside'}/{name}"
        try:
            found = run(autopar.parallelize(make(*form), **option))
        except Exception as error:
            wrong.append(f"{case} {type(error).__name__}")
            continue
        if not all(
            np.allclose(a, b, rtol=2e-4, atol=1e-6) for a, b in zip(found, expected)
        ):
            wrong.append(f"{case} differs")
print("chunked loss with count:", "; ".join(wrong) or "right")
sys.exit(bool(wrong))
