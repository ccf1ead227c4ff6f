"""What a solve knows so far: the best plan, the bound, and the time it has left."""

from collections.abc import Sequence
from math import inf
from time import perf_counter

from .array_pool import ArrayPool
from .assignment import Assignment, Phase
from .choice_graph import ChoiceGraph

# Below this a gap is rounding: bounds of linear programs are kept 1e-8 apart.
LEAST_GAP = 2e-8


class Search:
    """The best plan and bound of one full problem, improved step by step.

    `deadline` is in seconds of work, by the clock of `pool`. Plans that cost `cutoff`
    or more are of no use: once there is a plan, a bound that reaches it is enough.
    """

    def __init__(
        self,
        graph: ChoiceGraph,
        gap: float,
        deadline: float,
        pool: ArrayPool,
        cutoff: float = inf,
    ) -> None:
        self.graph, self.gap, self.deadline, self.pool = graph, gap, deadline, pool
        self.cutoff = cutoff
        self.choices: tuple[int, ...] | None = None
        self.cost, self.bound = inf, -inf
        self.phases: list[Phase] = []
        self.closed_by = "open"
        self._phase_start = perf_counter()

    @property
    def seconds_left(self) -> float:
        """Seconds of work, at least 0."""
        return max(self.deadline - self.pool.clock.now(), 0.0)

    @property
    def is_closed(self) -> bool:
        """Whether there is a plan, and no more of the bound is wanted."""
        if self.cost == inf:
            return False
        gap = max(self.gap, LEAST_GAP)
        is_near = self.cost - self.bound <= gap * abs(self.cost)
        return is_near or self.bound >= self.cutoff

    @property
    def threshold(self) -> float:
        """A cost so near the best that plans above it need not be looked at."""
        if self.cost == inf:
            return inf
        return min(self.cost - self.gap / 2 * abs(self.cost), self.cutoff)

    @property
    def most_useful_cost(self) -> float:
        """What a plan costs at most that beats the cutoff, or closes the gap below it.

        Without a plan any is of use.
        """
        if self.cost == inf or self.cutoff == inf:
            return inf
        return self.cutoff + 2 * self.gap * abs(self.cutoff)

    def offer(self, choices: Sequence[int]) -> bool:
        """Takes a plan of the full problem if it is allowed and the best so far."""
        cost = self.graph.cost(choices)
        if cost >= self.cost:
            return False
        self.choices, self.cost = tuple(map(int, choices)), cost
        return True

    def raise_bound(self, bound: float) -> None:
        """Takes a lower bound on every plan of the full problem."""
        self.bound = max(self.bound, bound)

    def finish_phase(self, name: str, left: ChoiceGraph) -> None:
        """Records what a step left over and the time since the step before."""
        now = perf_counter()
        phase = Phase(
            name,
            len(left.nodes),
            left.num_choices,
            len(left.edges),
            self.bound,
            self.cost,
            now - self._phase_start,
        )
        self.phases.append(phase)
        self._phase_start = now
        if self.is_closed and self.closed_by == "open":
            self.closed_by = name

    def result(self) -> Assignment:
        """The assignment found; there must be one."""
        assert self.choices is not None, "a finished search holds a plan"
        return Assignment(
            self.choices,
            self.cost,
            min(self.bound, self.cost),
            tuple(self.phases),
            self.closed_by,
        )
