"""Run a program on the devices of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..programs import SpmdProgram

_DELETED = (
    "A buffer that was given to a parallelized function as state was donated to it: "
    "its memory now holds the next state. Use the returned state instead, or pass "
    "donate_argnums=() to autopar.parallelize to keep both."
)


class LocalExecutable:
    """A program and its calls; after the first call a call costs what jit's costs."""

    def __init__(self, program: SpmdProgram) -> None:
        self.program = program
        self._was_called = False

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Flat outputs of one step.

        Leaves on other devices or in other shardings are moved first. The same buffer
        may come several times: all but the first are copied before they are donated.
        """
        program = self.program
        if not self._was_called:
            # JAX traces again for arguments of another sharding, so the first call
            # gets what later ones will: state in its home.
            leaves = jax.device_put(list(leaves), list(program.shardings))
            self._was_called = True
        donated, kept = program.split(leaves)
        if len(set(map(id, donated))) != len(donated):
            donated = _without_repeats(donated)
        constants = list(program.constants)
        try:
            return program.jitted(donated, kept, constants)
        except (ValueError, RuntimeError) as error:
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
                error.add_note(_DELETED)
                raise
            if not isinstance(error, ValueError) or self.is_in_place(leaves):
                raise
        placed = jax.device_put(list(leaves), list(program.shardings))
        donated, kept = program.split(placed)
        return program.jitted(donated, kept, constants)

    def is_in_place(self, leaves: Sequence[Any]) -> bool:
        """Whether every committed leaf already lies where the plan wants it."""
        return all(
            not isinstance(leaf, jax.Array)
            or not leaf.committed
            or leaf.sharding.is_equivalent_to(home, leaf.ndim)
            for leaf, home in zip(leaves, self.program.shardings, strict=True)
        )


def _without_repeats(arrays: Sequence[Any]) -> list[Any]:
    seen: set[int] = set()
    unique = []
    for array in arrays:
        unique.append(jax.numpy.copy(array) if id(array) in seen else array)
        seen.add(id(array))
    return unique
