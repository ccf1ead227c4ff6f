"""Conversions of values from one spec to another, as nodes before fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .kernels import exchanges, gathers_minor, is_cut_out, turns
from .node_table import NodeTable
from .plan_arrays import PlanArrays


@dataclass(frozen=True, eq=False)
class Conversions:
    """Each is (row before which it is needed, tensor, spec, conversion it is made of).

    The last is -1 where it is made of the tensor itself, which is `value_of` [tensors].
    It writes the value `of_copies` [conversions]. `arrays` has the specs by number.
    """

    each: Sequence[tuple[int, int, int, int]]
    value_of: np.ndarray
    of_copies: np.ndarray
    arrays: PlanArrays

    @cached_property
    def gathered(self) -> np.ndarray:
        """[conversions] those that gather along a dim that is not the major one."""
        return gathers_minor(*self.specs)

    def exchanged(self) -> dict[int, int]:
        """By value that an all_to_all makes, of how many parts it is put together."""
        is_along = exchanges(*self.specs)
        sizes = self.arrays.plan.mesh.axis_sizes
        parts = np.where(is_along, sizes, 1).prod(axis=-1)
        own = np.flatnonzero(is_along.any(axis=-1))
        return dict(zip(self.of_copies[own].tolist(), parts[own].tolist(), strict=True))

    @cached_property
    def specs(self) -> tuple[np.ndarray, np.ndarray]:
        """[conversions, axes], of what each reads and of what it makes."""
        _, tensor, spec, before = self.columns
        made = np.where(before < 0, self.arrays.made[tensor], spec[before])
        specs = np.array(self.arrays.specs)
        return specs[made], specs[spec]

    @cached_property
    def columns(self) -> np.ndarray:
        """[4, conversions] the parts of `each`."""
        return np.array(self.each, np.intp).reshape(-1, 4).T


def add_conversions(
    conversions: Conversions,
    value_bytes: np.ndarray,
    of_loops: np.ndarray,
    table: NodeTable,
) -> None:
    """Adds their nodes: what cuts is cheap, all others are collectives.

    Args:
      conversions: those of a block.
      value_bytes: [values].
      of_loops: values that loops read, as they are in memory.
      table: of the block's nodes.
    """
    row, tensor, _, before = conversions.columns
    copies, own = conversions.of_copies, np.arange(len(row))
    source = np.where(before < 0, conversions.value_of[tensor], copies[before])
    is_read = conversions.gathered & np.isin(copies, of_loops)
    turned = np.where(turns(*conversions.specs), value_bytes[source], 0)
    free = is_cut_out(*conversions.specs)
    table.add(
        2 * row,
        cheap=free,
        absorbs=free,
        repeated=free,
        inner=turned + np.where(is_read, value_bytes[copies], 0),
        reads=(own, source),
        writes=(own, copies),
    )
