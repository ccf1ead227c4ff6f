"""What benchmarks run: models of the zoo by name, and steps of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class BenchStep(Protocol):
    """A step with example arguments: a workload of the zoo, or an `OwnStep`."""

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> Callable[..., Any]: ...

    def abstract(self) -> tuple[Any, ...]:
        """The arguments as `jax.ShapeDtypeStruct`."""
        ...

    def arguments(self) -> tuple[Any, ...]:
        """Real arguments, the same values each time."""
        ...


@dataclass(frozen=True, eq=False)
class OwnStep:
    """A step that the command line named, with its example arguments.

    Examples without values get some: floats within [0, 1), zeros, False.
    """

    name: str
    step: Callable[..., Any]
    examples: tuple[Any, ...]

    def abstract(self) -> tuple[Any, ...]:
        return jax.tree.map(_without_value, self.examples)

    def arguments(self) -> tuple[Any, ...]:
        return jax.tree.map(_with_value, self.examples)


def find_target(name: str, args: str | None, settings: Mapping[str, Any]) -> BenchStep:
    """The step that a command line names.

    Args:
      name: of a model of the zoo, or `MODULE:NAME` as for `autopar plan`. A step that
        is parallelized already is taken as it was before, without its options.
      args: `MODULE:NAME` of the example arguments of a step of one's own.
      settings: of a model of the zoo, options by name.

    Raises:
      TypeError: what is named is no step with example arguments.
      ValueError: nothing has that name.
    """
    from autopar.api import ParallelFunction
    from autopar.commands.plan_targets import find_step
    from benchmarks.models import build

    if ":" not in name and args is None:
        return build(name, **settings)
    found = find_step(name, args, settings)
    step = found.step
    if isinstance(step, ParallelFunction):
        step = step.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
    return OwnStep(name, step, found.args)


def _without_value(leaf: Any) -> Any:
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf


def _with_value(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jnp.copy(leaf)  # a step may take its arguments' buffers
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        values = jax.random.uniform(jax.random.key(0), leaf.shape)
        return values.astype(leaf.dtype)
    return jnp.zeros(leaf.shape, leaf.dtype)
