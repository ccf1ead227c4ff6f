"""Conversions of values from one spec to another, as nodes before fusion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from .kernels import gathers_minor, is_cut_out, turns
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


def add_conversions(
    conversions: Conversions,
    arrays: PlanArrays,
    value_bytes: np.ndarray,
    as_they_lie: Collection[int],
    table: NodeTable,
) -> None:
    """Adds their nodes: what cuts is cheap, all others are collectives.

    Args:
      conversions: those of a block.
      arrays: the specs by number.
      value_bytes: [values].
      as_they_lie: values that loops and products read, as they are in memory.
      table: of the block's nodes.
    """
    held, known = value_bytes.tolist(), dict[tuple[int, int], tuple[bool, ...]]()
    is_free, inner, source = list[bool](), list[int](), list[int]()
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
            turned + (held[copy] if is_gathered and copy in as_they_lie else 0)
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
