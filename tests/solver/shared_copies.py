"""A value that is built once and shared, as a two-choice node of a choice graph.

The planner has relays instead.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from autopar.solver.choice_graph import Edge


def shared_copy(
    producer: int,
    readers: Sequence[tuple[int, np.ndarray]],
    build_costs: np.ndarray,
    producer_class: np.ndarray,
    copy: int,
) -> tuple[Edge, ...]:
    """The edges of a value that is built once from `producer` and read by many.

    The copy itself is the node `copy` with two choices, absent (0) and present (1),
    whose bytes are 0 and the size of the value.

    Args:
        producer: node the value is built from.
        readers: (node, needs [k] bool): the choices of a reader that need the copy.
        build_costs: [producer classes], the cost of building it from each class.
        producer_class: [k of the producer], the class of each of its choices.
        copy: index of the two-choice node.
    """
    both = np.arange(2)
    build = np.stack([np.zeros_like(build_costs), build_costs], axis=1)
    needs_present = np.array([[0.0, 0.0], [inf, 0.0]])
    made = Edge(producer, copy, producer_class, both, build)
    return (
        made,
        *(
            Edge(reader, copy, needs.astype(np.intp), both, needs_present)
            for reader, needs in readers
        ),
    )
