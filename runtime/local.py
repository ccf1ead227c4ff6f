"""Run a program on the devices of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..programs import SignatureChanged, SpmdProgram, is_traced

_NO_DATA = (
    "A step runs on arrays, but got a jax.ShapeDtypeStruct among its arguments; use "
    "step.plan(...) or step.lower(...), which need no data."
)
_WEAK_SCALARS = (int, float, complex)


class LocalExecutable:
    """A compiled program and its calls, which never trace or compile again.

    A jitted function would: an array's type names the mesh it lies on, so a fresh array
    and the one that a step returned are different types to it.
    """

    def __init__(self, program: SpmdProgram) -> None:
        self.program = program
        self._compiled = program.compile()
        self._weak_types = tuple(t.weak_type for t in program.argument_types)

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """Flat outputs of one step.

        Leaves on other devices or in other shardings are moved first. The same buffer
        may come several times: all but the first are copied before they are donated.

        Raises:
          TypeError: a leaf that is a shape only.
          SignatureChanged: other shapes, dtypes or weak types than those planned for.
          RuntimeError: as JAX's own, if a donated buffer is used again.
        """
        if is_traced(leaves):
            return self._run_traced(leaves)
        # XLA's CPU client does not survive a deleted buffer of several devices.
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise _deleted_error(self._deleted(leaves))
        if tuple(map(_is_weak, leaves)) != self._weak_types:
            raise SignatureChanged
        try:
            return self._run(leaves)
        except TypeError:
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
                raise TypeError(_NO_DATA) from None
            if self._fits(leaves):
                raise
            raise SignatureChanged from None
        except ValueError:
            if self._is_in_place(leaves):
                raise
        return self._run(jax.device_put(list(leaves), list(self.program.shardings)))

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        donated, kept = self.program.split(leaves)
        if len(set(map(id, donated))) != len(donated):
            donated = _without_repeats(donated)
        return self._compiled(donated, kept, list(self.program.constants))

    def _run_traced(self, leaves: Sequence[Any]) -> list[Any]:
        """Inside another JAX transformation, which a compiled program cannot join."""
        if not self._fits(leaves):
            raise SignatureChanged
        donated, kept = self.program.split(leaves)
        return self.program.jitted(donated, kept, list(self.program.constants))

    def _fits(self, leaves: Sequence[Any]) -> bool:
        """Whether the leaves have the shapes and dtypes planned for."""
        types = zip(map(jax.typeof, leaves), self.program.argument_types, strict=True)
        return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in types)

    def _is_in_place(self, leaves: Sequence[Any]) -> bool:
        """Whether every committed leaf already lies where the plan wants it."""
        return all(
            not isinstance(leaf, jax.Array)
            or not leaf.committed
            or leaf.sharding.is_equivalent_to(home, leaf.ndim)
            for leaf, home in zip(leaves, self.program.shardings, strict=True)
        )

    def _deleted(self, leaves: Sequence[Any]) -> list[tuple[str, jax.Array]]:
        """Paths and leaves whose buffers are gone."""
        return [
            (path, leaf)
            for path, leaf in zip(self.program.paths, leaves, strict=True)
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ]


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf leaves its dtype to what it meets, as Python's numbers do."""
    return getattr(leaf, "weak_type", type(leaf) in _WEAK_SCALARS)


def _deleted_error(deleted: Sequence[tuple[str, jax.Array]]) -> RuntimeError:
    """JAX's own words, and which argument it is and what to do."""
    paths = [path for path, _ in deleted]
    some = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
    leaf = deleted[0][1]
    return RuntimeError(
        f"Array has been deleted with shape={leaf.dtype.name}{list(leaf.shape)}: each "
        f"array may be donated once, but {some} was given to a parallelized function "
        f"before and its memory now holds the next state. Pass the state that the last "
        f"call returned, or pass donate_argnums=() to autopar.parallelize to keep both."
    )


def _without_repeats(arrays: Sequence[Any]) -> list[Any]:
    seen: set[int] = set()
    unique = []
    for array in arrays:
        unique.append(jax.numpy.copy(array) if id(array) in seen else array)
        seen.add(id(array))
    return unique
