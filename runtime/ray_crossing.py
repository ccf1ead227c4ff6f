"""Which hosts exchange a value that goes from one submesh to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.lowering.exported_program import ShardedType


@dataclass(frozen=True)
class Crossing:
    """A value on the submesh that sends it and on the one that reads it.

    Each has its type there, and the ranks of its hosts, which hold equal shares of the
    submesh in their order.
    """

    source: ShardedType
    target: ShardedType
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]

    @property
    def is_inside(self) -> bool:
        """Whether it stays on the same hosts."""
        return self.source_ranks == self.target_ranks

    def is_of(self, rank: int) -> bool:
        """Whether a host sends or reads a part of it."""
        return rank in self.source_ranks or rank in self.target_ranks


def meet(rank: int, own: Sequence[int], peer: int, others: Sequence[int]) -> bool:
    """Whether two hosts of different groups hold some same part of all that crosses.

    Each holds an equal share of it, in the order of the hosts of its group.
    """
    here, there = own.index(rank), others.index(peer)
    starts_before = here * len(others) < (there + 1) * len(own)
    return starts_before and there * len(own) < (here + 1) * len(others)
