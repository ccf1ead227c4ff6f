"""Relays hold no more than they must, where that costs no more.

Without prices on memory a tensor may be gathered in part on its way to a reader that
needs no more than before: an exchange costs the same with that stop and without. The
plan has no such copy (`plan_reader.cheapest_copies`), but rows of memory would tell of
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autopar.solver.descent import Descent

from .sharding_problem import ShardingProblem

ROUNDING = 1e-12


class RelayTies:
    """The relays of a problem, and what each costs between its neighbours."""

    def __init__(self, problem: ShardingProblem) -> None:
        self._problem = problem
        self._relay = np.full(len(problem.graph.tensors), -1)
        self._relay[list(problem.relays)] = list(problem.relays.values())

    def holding_least(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The assignment, relays that nobody reads as they are with the fewest bytes.

        Of equal ones it is the cheapest.
        """
        found, bytes_of = list(choices), self._problem.choice_graph.bytes_by_node
        for relay in self._unread(choices).tolist():
            costs = self._costs.values(relay, found)
            own = costs[found[relay]]
            is_tied = costs <= own + ROUNDING * abs(own)
            held = np.where(is_tied, bytes_of[relay], np.inf)
            least = np.flatnonzero(held == held.min())
            if held[least[0]] < held[found[relay]]:
                found[relay] = int(least[costs[least].argmin()])
        return tuple(found)

    def _unread(self, choices: Sequence[int]) -> np.ndarray:
        """Relays in specs in which no reader has the tensor."""
        columns, relays = self._problem.columns, self._relay
        reads, writes = columns.reads, columns.writes
        spec = np.full(len(columns), -1)
        spec[writes.vertex] = columns.chosen_specs(writes, choices)
        at = relays[reads.tensor]
        is_read = (at >= 0) & (at != reads.vertex) & ~self._problem.is_late
        is_same = columns.chosen_specs(reads, choices) == spec[at]
        return np.setdiff1d(relays[relays >= 0], at[is_read & is_same])

    @cached_property
    def _costs(self) -> Descent:
        relays = self._problem.relays.values()
        return Descent(self._problem.choice_graph, list(relays))
