"""What the fuzzer found, as the few lines that were left of each program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.mesh import MeshShape
from tests.fuzz.oracle import check_function
from tests.fuzz.plans import Case

MESHES = [
    MeshShape(("x", "y"), (1, 4)),
    MeshShape(("x", "y"), (2, 4)),
    MeshShape(("x",), (8,)),
]


def check(function: Callable[..., Any], *args: Any, seeds: int = 4) -> None:
    """Right under random plans on several meshes."""
    for mesh in MESHES:
        for seed in range(seeds):
            check_function(function, args, Case(mesh, "uniform", seed))


def test_tensors_without_elements_are_resharded() -> None:
    """`all_gather` and `reduce_scatter` of an empty dim do not lower."""

    def function(x: jax.Array) -> Any:
        empty = x[:, 4:]
        return empty * 2, jnp.concatenate([jnp.sin(empty), x], 1), empty.sum(1)

    check(function, np.ones((4, 4), np.float32))
