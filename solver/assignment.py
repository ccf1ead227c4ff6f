"""The answer: a choice per node, its cost, and a bound no assignment goes below."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One step of the solve: what it left, and the seconds it took."""

    name: str
    num_nodes: int
    num_choices: int
    num_edges: int
    bound: float
    cost: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name:<12} {self.num_nodes:>7} nodes {self.num_choices:>8} choices "
            f"{self.num_edges:>7} edges  bound {self.bound:<12.6g} "
            f"cost {self.cost:<12.6g} {self.seconds:.3f} s"
        )


@dataclass(frozen=True)
class Assignment:
    """A choice per node.

    `bound` is a lower bound on the cost of every assignment of the full problem, so
    `gap` says how far from optimal `choices` can be. `phases` are the steps in order,
    each with what was left after it; `closed_by` names the step that reached the wanted
    gap or the cutoff, or is "open".
    """

    choices: tuple[int, ...]
    cost: float
    bound: float
    phases: tuple[Phase, ...] = ()
    closed_by: str = "open"

    @property
    def gap(self) -> float:
        """(cost - bound) / cost, at least 0."""
        return max(self.cost - self.bound, 0.0) / max(abs(self.cost), 1e-300)

    @property
    def seconds(self) -> float:
        """The whole time of the solve."""
        return sum(phase.seconds for phase in self.phases)

    def __str__(self) -> str:
        head = (
            f"Assignment: cost {self.cost:.6g}, bound {self.bound:.6g}, "
            f"gap {self.gap:.3%} ({self.closed_by}), "
            f"{self.seconds:.3f} s"
        )
        return "\n".join([head, *(f"  {phase}" for phase in self.phases)])
