"""Which live sets can bind, and what a budget alone forbids."""

from dataclasses import replace
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, Infeasible, Node, allowed


def keep_binding(graph: ChoiceGraph) -> ChoiceGraph:
    """The graph without live sets that always fit, or lie within a neighbouring one,
    and without choices that leave too little for the least of all others.

    Raises:
        Infeasible: the least bytes of some live set do not fit.
    """
    assert graph.budget is not None, "only a budget makes a live set bind"
    least, most = extreme_bytes(graph)
    low, high = graph.sum_live(least), graph.sum_live(most)
    limit = allowed(graph.budget)
    if low.max(initial=0.0) > limit:
        raise Infeasible("no choice is small enough", inf, float(low.max()))
    live_sets: list[tuple[int, ...]] = []
    last: set[int] = set()
    room = np.full(len(graph.nodes), inf)
    for live, free, top in zip(graph.live_sets, limit - low, high, strict=True):
        if top <= limit:
            continue
        members = list(live)
        room[members] = np.minimum(room[members], free)
        current = set(live)
        if live_sets and current <= last:
            continue
        if live_sets and last <= current:
            live_sets.pop()
        live_sets.append(live)
        last = current
    nodes = tuple(
        _forbid(node, node.bytes - smallest > spare)
        for node, smallest, spare in zip(graph.nodes, least, room, strict=True)
    )
    return replace(graph, nodes=nodes, live_sets=tuple(live_sets))


def extreme_bytes(graph: ChoiceGraph) -> tuple[np.ndarray, np.ndarray]:
    """[nodes] the least and the most bytes of an allowed choice."""
    usable = [node.bytes[np.isfinite(node.costs)] for node in graph.nodes]
    least = np.array([held.min(initial=inf) for held in usable])
    most = np.array([held.max(initial=0.0) for held in usable])
    return least, most


def _forbid(node: Node, is_forbidden: np.ndarray) -> Node:
    if not is_forbidden.any():
        return node
    return Node(node.name, np.where(is_forbidden, inf, node.costs), node.bytes)
