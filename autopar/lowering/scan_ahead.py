"""A scan that gathers slices one iteration ahead, with its last iteration behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph.op_graph import Operator

Gather = Callable[[int, Any], Any]


@dataclass
class Upcoming:
    """What a loop has gathered for its next iteration, while its body is run."""

    values: list[Any] = field(default_factory=list[Any])

    def through_barrier(self, operands: Sequence[Any]) -> list[Any]:
        """Operands that are there no sooner than all that is gathered ahead."""
        count = len(operands)
        passed = lax.optimization_barrier((*operands, *self.values))
        self.values = list(passed[count:])
        return list(passed[:count])


def scan_ahead(
    op: Operator,
    operands: Sequence[jax.Array],
    positions: Sequence[int],
    gather: Gather,
    run_body: Callable[[list[Any], list[Any], Upcoming], list[Any]],
    stacked: Sequence[jax.ShapeDtypeStruct],
) -> list[Any]:
    """What the scan `op` returns.

    Args:
      op: has two iterations or more.
      operands: of the scan, on this device.
      positions: the operands whose slices are gathered ahead.
      gather: the slice of the operand at a position, given as it lies, gathered.
      run_body: from the inputs of the body and the gathered slices among them to its
        outputs.
      stacked: the type on this device of each result that is stacked.
    """
    first = op.params["num_consts"]
    num_carry, length = op.params["num_carry"], op.params["length"]
    consts, init = list(operands[:first]), list(operands[first : first + num_carry])

    def at(step: Any) -> Any:
        return length - 1 - step if op.params["reverse"] else step

    def slice_of(x: jax.Array, step: Any) -> jax.Array:
        return lax.dynamic_index_in_dim(x, at(step), axis=0, keepdims=False)

    def gathered(step: Any) -> list[Any]:
        return [gather(p, slice_of(operands[p], step)) for p in positions]

    def iterate(
        step: Any, carry: list[Any], here: list[Any], rows: list[Any], after: Upcoming
    ) -> tuple[list[Any], list[Any]]:
        slices = [slice_of(x, step) for x in operands[first + num_carry :]]
        outputs = run_body([*consts, *carry, *slices], here, after)
        rows = [
            lax.dynamic_update_index_in_dim(whole, row, at(step), axis=0)
            for whole, row in zip(rows, outputs[num_carry:], strict=True)
        ]
        return outputs[:num_carry], rows

    def body(state: Any, step: jax.Array) -> tuple[Any, None]:
        carry, here, rows = state
        after = Upcoming(gathered(step + 1))
        carry, rows = iterate(step, carry, here, rows, after)
        return (carry, after.values, rows), None

    rows = [jnp.zeros(each.shape, each.dtype) for each in stacked]
    steps = jnp.arange(length - 1, dtype=jnp.int32)
    (carry, here, rows), _ = lax.scan(body, (init, gathered(0), rows), steps)
    carry, rows = iterate(length - 1, carry, here, rows, Upcoming())
    return [*carry, *rows]
