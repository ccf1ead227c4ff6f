"""A first plan for a mesh of several axes: that of the same devices along one axis.

The one-axis problem is many times smaller, and where axes are equally fast its plan is
often as good as any. The solver starts from it and needs only to prove or improve it.
"""

from __future__ import annotations

from autopar.solver.solve import solve

from .build_graph import PINS, SHARD_MAP
from .cluster import Cluster
from .graph import OpGraph
from .mesh import MeshShape
from .resharding import Resharder
from .sharding_problem import ShardingProblem, Vertex, build_problem

_GAP = 1e-2  # a start need not be proven


def flat_start(
    graph: OpGraph, cluster: Cluster, problem: ShardingProblem
) -> tuple[int, ...] | None:
    """Choices for `problem` that treat all its axes alike; None if there are none.

    A graph with constraints on the mesh's own axes has no such plan.
    """
    mesh = problem.mesh
    if mesh.num_axes == 1 or any(
        op.kind in (SHARD_MAP, *PINS) for op in graph.operators()
    ):
        return None
    flat_mesh = MeshShape(("all",), (mesh.size,))
    flat = build_problem(graph, flat_mesh, cluster, Resharder(flat_mesh, cluster))
    assignment = solve(flat.choice_graph, gap=_GAP)
    choices = [
        _spread(wide, narrow, choice)
        for wide, narrow, choice in zip(
            problem.vertices, flat.vertices, assignment.choices, strict=True
        )
    ]
    if any(choice is None for choice in choices):
        return None
    return tuple(choice for choice in choices if choice is not None)


def _spread(wide: Vertex, narrow: Vertex, choice: int) -> int | None:
    """The choice of `wide` that does on every axis what `narrow` does on its one."""
    if narrow.strategies is not None and wide.strategies is not None:
        factor = narrow.strategies.factor_index[choice, 0]
        found = (wide.strategies.factor_index == factor).all(axis=1)
    else:
        accesses = zip(
            (*wide.writes, *wide.reads), (*narrow.writes, *narrow.reads), strict=True
        )
        found = None
        for access, narrow_access in accesses:
            narrow_state = narrow_access.choices.specs[choice, 0]
            same = (access.choices.specs == narrow_state).all(axis=1)
            found = same if found is None else found & same
        if found is None:
            return choice
    rows = found.nonzero()[0]
    return int(rows[0]) if len(rows) else None
