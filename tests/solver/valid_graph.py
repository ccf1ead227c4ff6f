"""What the format of a choice graph asks for, as assertions."""

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph


def assert_valid(graph: ChoiceGraph) -> None:
    """Fails at the first thing that breaks the format."""
    count = len(graph.nodes)
    for node in graph.nodes:
        assert node.costs.ndim == 1 and node.costs.size and (node.costs >= 0).all()
        assert node.bytes.shape == node.costs.shape
        assert ((node.bytes >= 0) & np.isfinite(node.bytes)).all()
    for edge in graph.edges:
        ends = edge.first, edge.second
        assert edge.first != edge.second and 0 <= min(ends) <= max(ends) < count
        assert edge.costs.ndim == 2 and (edge.costs >= 0).all()
        classes_of = edge.first_class, edge.second_class
        sides = zip(ends, classes_of, edge.costs.shape, strict=True)
        for end, classes, number in sides:
            assert classes.shape == graph.nodes[end].costs.shape
            assert classes.dtype.kind in "iu"
            assert 0 <= classes.min() <= classes.max() < number
    assert np.isfinite(graph.constant)
