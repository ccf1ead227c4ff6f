"""A scan over chunks carries losses and the number of tokens that divides them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from tests.marks import slow

CHUNKS, EXAMPLES, TOKENS, WIDTH, WORDS = 2, 8, 4, 16, 24


def step(weights: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    def loss(weights):
        hidden = jnp.tanh(weights["table"][batch["words"]] @ weights["w"])

        @jax.checkpoint
        def chunk(carry, part):
            logits, labels = part[0] @ weights["head"], part[1]
            is_counted = labels >= 0
            own = jnp.take_along_axis(logits, labels.clip(0)[..., None], -1)[..., 0]
            each = jnp.where(is_counted, jax.nn.logsumexp(logits, -1) - own, 0)
            is_right = is_counted & (logits.argmax(-1) == labels)
            return {
                "loss": carry["loss"] + each.sum(),
                "count": carry["count"] + is_counted.sum(),
                "right": carry["right"] + is_right.sum(),
            }, None

        chunks = jax.tree.map(
            lambda a: jnp.moveaxis(a.reshape(EXAMPLES, CHUNKS, TOKENS, -1), 1, 0),
            (hidden, batch["labels"]),
        )
        start = {"loss": jnp.float32(0), "count": jnp.int32(0), "right": jnp.int32(0)}
        found, _ = jax.lax.scan(chunk, start, (chunks[0], chunks[1][..., 0]))
        number = jnp.maximum(found["count"], 1)
        return found["loss"] / number, (found["count"], found["right"] / number)

    (value, counts), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients), (value, counts)


@pytest.mark.parametrize(
    "options",
    [
        slow(
            {"mesh": "x:8", "num_microbatches": 4}
        ),  # and in tests/cases/chunked_loss_with_count.py
        {"method": PipelineParallel(num_stages=2, num_microbatches=4)},
    ],
    ids=["microbatches", "stages"],
)
def test_a_count_that_a_scan_carries_beside_losses_is_that_of_the_batch(options):
    keys = jax.random.split(jax.random.key(0), 5)
    weights = {
        "table": jax.random.normal(keys[0], (WORDS, WIDTH)) / 4,
        "w": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 4,
        "head": jax.random.normal(keys[2], (WIDTH, WORDS)) / 4,
    }
    shape = (EXAMPLES, CHUNKS * TOKENS)
    batch = {
        "words": jax.random.randint(keys[3], shape, 0, WORDS),
        "labels": jax.random.randint(keys[4], shape, -WORDS, WORDS),
    }
    found = parallelize(step, donate_argnums=(), **options)(weights, batch)
    expected = jax.jit(step)(weights, batch)
    for a, b in zip(
        jax.tree.leaves(jax.device_get(found)),
        jax.tree.leaves(jax.device_get(expected)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
