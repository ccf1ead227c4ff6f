"""What searches met within other budgets, from which one of an equal problem goes on.

Where a program needs more than was predicted, the same step is planned again within a
little less (`audit/compiled_memory.py`). The plans met, their rows of memory and what
was proved with them hold whatever the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph

from .graph_text import digest_of, graph_lines
from .least_memory import LeastMemory
from .met_plans import MetPlans
from .sharding_problem import ShardingProblem


@dataclass(frozen=True)
class EarlierSearches:
    """By problem: what a search met, and the least memory found for some budget."""

    _met: dict[bytes, MetPlans] = field(default_factory=dict)
    _least: dict[bytes, tuple[int, LeastMemory]] = field(default_factory=dict)

    def met(self, key: bytes) -> MetPlans | None:
        """What the latest search of a problem met, if there was one."""
        return self._met.get(key)

    def keep_met(self, key: bytes, met: MetPlans) -> None:
        """For later searches of the problem; this one is over."""
        self._met[key] = met

    def least(self, key: bytes, enough_bytes: int) -> LeastMemory | None:
        """What a search for the least memory finds, as far as it is known.

        One that ended above what was enough ends so wherever no more is. What was
        enough once is known where that much still is, but less may be there.
        """
        asked, found = self._least.get(key, (0, None))
        if found is None or found.found.peak_bytes <= enough_bytes:
            return found
        went_on = found.found.peak_bytes > asked >= enough_bytes
        return found if went_on else None

    def keep_least(self, key: bytes, enough_bytes: int, found: LeastMemory) -> None:
        """What a search found that would end with so many bytes."""
        self._least[key] = enough_bytes, found

    def __str__(self) -> str:
        return f"EarlierSearches: of {len(self._met)} problems"


def problem_key(problem: ShardingProblem) -> bytes:
    """Equal for equal problems: of one graph and mesh, with the same choices left."""
    digest = digest_of((str(problem.mesh), *graph_lines(problem.graph)))
    for array in _arrays(problem.choice_graph):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _arrays(graph: ChoiceGraph) -> Iterator[np.ndarray]:
    types = graph.types
    yield from (types.node, types.edge, types.first, types.second)
    yield from (graph.nodes[index].costs for index in types.node_of.tolist())
    for index in types.edge_of.tolist():
        edge = graph.edges[index]
        yield from (edge.first_class, edge.second_class, edge.costs)
