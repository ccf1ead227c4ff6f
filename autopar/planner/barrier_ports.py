"""What passes a barrier passes it as it lies, where that costs no more.

A barrier may read a slice of a copy that was made before it: no time is lost, but the
copy is kept in memory until then. Mixtures of plans come by such choices, as rows of
memory, which take the reading of the plan that brought them, do not tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.descent import Descent

from ..graph.ports import barriers_of
from .sharding_problem import ShardingProblem

ROUNDING = 1e-12


class BarrierPorts:
    """The vertices of a problem by which tensors with relays pass barriers."""

    def __init__(self, problem: ShardingProblem) -> None:
        self._problem = problem
        writers, relays = problem.writers, problem.relays
        self._passed = {  # the tensor, by port
            writers[behind][0]: tensor
            for block in problem.graph.blocks
            for _, (tensor, behind) in barriers_of(block)
            if tensor in relays
        }
        self._costs = Descent(problem.choice_graph, self._passed)

    def passing_as_it_lies(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The assignment, with no port for nothing in another spec than its tensor."""
        problem, found = self._problem, list(choices)
        for port, tensor in self._passed.items():
            writer, made = problem.writers[tensor]
            home = made.choices.of(found[writer])
            relay = problem.relays[tensor]
            copied = problem.vertices[relay].writes[0].choices.of(found[relay])
            own = problem.vertices[port].writes[0].choices
            if home in (copied, own.of(found[port])):
                continue
            cost = self._costs.values(port, found)
            best = int(np.where(own.are(home), cost, np.inf).argmin())
            if cost[best] <= cost[found[port]] + ROUNDING * abs(cost[found[port]]):
                found[port] = best
        return tuple(found)
