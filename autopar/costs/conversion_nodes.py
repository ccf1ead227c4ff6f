"""Conversions of values from one spec to another, as nodes before fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .kernels import exchanges, gathers_minor, is_cut_out, turns
from .node_table import NodeTable
from .plan_arrays import PlanArrays


@dataclass(frozen=True, eq=False)
class Conversions:
    """Each is (row before which it is needed, tensor, spec, conversion it is made of).

    The last is -1 where it is made of the tensor itself, which is `value_of` [tensors].
    It writes the value `of_copies` [conversions].
    """

    each: Sequence[tuple[int, int, int, int]]
    value_of: np.ndarray
    of_copies: np.ndarray

    def gathered(self, arrays: PlanArrays) -> np.ndarray:
        """The values that are gathered along a dim that is not the major one."""
        return self.of_copies[gathers_minor(*self._specs(arrays))]

    def exchanged(self, arrays: PlanArrays) -> dict[int, int]:
        """By value that an all_to_all makes, of how many parts it is put together."""
        is_along = exchanges(*self._specs(arrays))
        parts = np.where(is_along, arrays.plan.mesh.axis_sizes, 1).prod(axis=-1)
        own = np.flatnonzero(is_along.any(axis=-1))
        return dict(zip(self.of_copies[own].tolist(), parts[own].tolist(), strict=True))

    def _specs(self, arrays: PlanArrays) -> tuple[np.ndarray, np.ndarray]:
        """[conversions, axes], of what each reads and of what it makes."""
        _, tensor, spec, before = np.array(self.each, np.intp).reshape(-1, 4).T
        made = np.where(before < 0, arrays.made[tensor], spec[before])
        specs = np.array(arrays.specs)
        return specs[made], specs[spec]


def add_conversions(
    conversions: Conversions,
    arrays: PlanArrays,
    value_bytes: np.ndarray,
    of_loops: np.ndarray,
    table: NodeTable,
) -> None:
    """Adds their nodes: what cuts is cheap, all others are collectives.

    Args:
      conversions: those of a block.
      arrays: the specs by number.
      value_bytes: [values].
      of_loops: values that loops read, as they are in memory.
      table: of the block's nodes.
    """
    held, known = value_bytes.tolist(), dict[tuple[int, int], tuple[bool, ...]]()
    is_free, inner, source = list[bool](), list[int](), list[int]()
    read_by_loops = set(of_loops.tolist())
    copies = conversions.of_copies.tolist()
    for (_, tensor, spec, before), copy in zip(conversions.each, copies, strict=True):
        if before < 0:
            value, made = int(conversions.value_of[tensor]), int(arrays.made[tensor])
        else:
            value, made = copies[before], conversions.each[before][2]
        if (made, spec) not in known:
            pair = arrays.specs[made], arrays.specs[spec]
            turned = bool(turns(*pair)), bool(gathers_minor(*pair))
            known[made, spec] = is_cut_out(*pair), *turned
        is_cut, is_turned, is_gathered = known[made, spec]
        is_free.append(is_cut)
        turned = held[value] if is_turned else 0
        inner.append(
            turned + (held[copy] if is_gathered and copy in read_by_loops else 0)
        )
        source.append(value)
    free, own = np.array(is_free, bool), np.arange(len(source))
    table.add(
        2 * np.array([each[0] for each in conversions.each], np.intp),
        cheap=free,
        absorbs=free,
        repeated=free,
        inner=np.array(inner, np.int64),
        reads=(own, np.array(source, np.intp)),
        writes=(own, conversions.of_copies),
    )
