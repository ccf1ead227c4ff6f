"""The line of forward work that stages are cut along, and where its borders may lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Operator, OpGraph
from ..planner.strategies import is_heavy_operator, total_flops
from .stage_borders import border_places, product_borders, stage_borders


@dataclass(frozen=True, eq=False)
class WorkLine:
    """The forward work that stages are cut along: units in trace order.

    A unit is an operator, or one iteration of a scan over layers, with its number.
    `crossing_bytes[p]` is what a border before unit p moves, infinite where none may
    lie: remat hands a layer's parameters on together with its input, in the backward
    pass, so these must be on one stage.
    """

    units: tuple[tuple[Operator, int], ...]
    costs: tuple[float, ...]  # flops
    crossing_bytes: tuple[float, ...]

    def borders(self, num_stages: int, products: Sequence[int] | None) -> list[int]:
        """Units at which stages 1, 2, ... begin.

        Raises:
          ValueError: fewer products than stages, or others than `products` add up to.
        """
        if products is None:
            return stage_borders(self.costs, self.crossing_bytes, num_stages)
        total = sum(cost > 0 for cost in self.costs)
        if len(products) != num_stages or sum(products) != total or min(products) < 1:
            raise ValueError(
                f"`stage_products` must give each of {num_stages} stages a product or "
                f"more, {total} in all, as the step's forward pass has, but got "
                f"{tuple(products)}."
            )
        places = border_places(self.costs, self.crossing_bytes)
        found, before = [], 0
        for number in products[:-1]:
            before += number
            found.append(places[before - 1])
            if self.crossing_bytes[found[-1]] == float("inf"):
                raise ValueError(
                    f"A rematerialised layer must be on one stage, but a border after "
                    f"product {before} would cut one; move it in `stage_products`."
                )
        return found

    def balanced(self, num_stages: int, costs: Sequence[float]) -> tuple[int, ...]:
        """Products of each stage such that the slowest is as fast as can be.

        `costs` are those of the products, in order and any unit.

        Raises:
          ValueError: fewer products than stages, or another number of costs.
        """
        places = border_places(self.costs, self.crossing_bytes)
        number = sum(cost > 0 for cost in self.costs)
        if len(costs) != number:
            raise ValueError(
                f"`layer_costs` must have a cost for each product of the step's "
                f"forward pass, {number}, those of every layer of a scan apart, but "
                f"got {len(costs)}; give 0 to those that cost next to nothing."
            )
        crossing = [self.crossing_bytes[place] for place in places]
        borders = product_borders(costs, crossing, num_stages)
        return tuple(j - i for i, j in pairwise([0, *borders, number]))


def heavy_flops(graph: OpGraph, op: Operator) -> float:
    """Flops of the products of one operator, in its bodies too; it runs once."""
    if op.kind not in STRUCTURED:
        return total_flops(op) if is_heavy_operator(op) else 0.0
    return sum(
        heavy_flops(graph, inner)
        * (graph.blocks[body].weight / graph.blocks[op.block].weight)
        for body in op.bodies
        for inner in graph.blocks[body].operators
    )
