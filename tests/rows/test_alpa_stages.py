"""Row ALP-3: how layers are dealt out to stages."""

from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.rows.fixtures import random


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_alp_3_stages_are_those_of_exhaustive_search(num_stages: int) -> None:
    """Six layers of differing work: no cut has a faster slowest stage, but for the
    15% over an even share that fewer bytes may cost."""
    sizes = (16, 64, 32, 96, 16, 48, 16)
    layers = [random(i, *pair, scale=0.1) for i, pair in enumerate(pairwise(sizes))]

    def step(layers: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], Any]:
        def loss(layers: list[jax.Array]) -> jax.Array:
            y = x
            for layer in layers:
                y = jnp.tanh(y @ layer)
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(layers)
        return [w - 0.1 * g for w, g in zip(layers, grads, strict=True)], value

    method = autopar.PipelineParallel(num_stages, 4, stage_meshes=["a:1"] * num_stages)
    plan = autopar.parallelize(step, method=method).plan(layers, random(9, 16, 16))
    work = [layer.size for layer in layers]
    stages = [
        [work[int(i.path[7])] for i in each.sharding.inputs if "layers[" in i.path]
        for each in plan.stages.programs
        if each.kind == "apply"
    ]
    assert sorted(sum(stages, [])) == sorted(work)
    slowest = max(map(sum, stages))
    best = min(
        max(sum(work[a:b]) for a, b in pairwise((0, *cut, 6)))
        for cut in combinations(range(1, 6), num_stages - 1)
    )
    assert best <= slowest <= max(best, 1.15 * sum(work) / num_stages)
