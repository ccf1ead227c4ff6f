"""A user's own shard_map in the step: its mesh, and the collectives it makes itself.

Our program is one region manual over the whole mesh. A shard_map over axes of that mesh
is inlined into it (see `graph/blocks.py`): operands come in the specs that
its in_specs say, whole along other axes, and its body runs on them as it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..clusters.cluster import Cluster
from ..errors import FallbackWarning
from ..graph.build_graph import ASSUMED_TRIPS, SHARD_MAP
from ..graph.op_graph import Operator, OpGraph
from ..jax_compat import CALLS, callee, source_line
from ..sharding.collective import Collective, Groups, Surroundings
from ..sharding.mesh import MeshShape
from .compute import flops, operator_seconds

# Kind, reduction, and the size of a result as a multiple of its operand's.
_Traffic = tuple[str, str, Callable[[int], float]]


def _same(group_size: int) -> float:
    del group_size
    return 1.0


COLLECTIVES: Mapping[str, _Traffic] = {
    "psum": ("all_reduce", "sum", _same),
    "psum_invariant": ("all_reduce", "sum", _same),
    "pmax": ("all_reduce", "max", _same),
    "pmin": ("all_reduce", "min", _same),
    "all_gather": ("all_gather", "", float),
    "all_gather_invariant": ("all_gather", "", float),
    "reduce_scatter": ("reduce_scatter", "sum", lambda size: 1 / size),
    "all_to_all": ("all_to_all", "", _same),
    "ppermute": ("collective_permute", "", _same),
    "pbroadcast": ("collective_broadcast", "", _same),
}
# Params that name mesh axes. An equation with one of them that is no collective of ours
# is one that a plan cannot state.
_AXIS_PARAMS = ("axes", "axis_name")
_SILENT = frozenset("axis_index pvary pcast".split())


def user_mesh(graph: OpGraph) -> MeshShape | None:
    """The mesh of the first shard_map in the graph."""
    for op in graph.operators():
        if op.kind == SHARD_MAP:
            return _shape(op.params["mesh"])
    return None


def _shape(mesh: Any) -> MeshShape:
    return MeshShape(tuple(mesh.axis_names), tuple(mesh.shape.values()))


def check_shard_maps(graph: OpGraph, mesh: MeshShape) -> None:
    """Does nothing if every shard_map of the graph can run on `mesh`.

    Raises:
      ValueError: one has an axis that `mesh` lacks, or has in another size.
      NotImplementedError: one holds a shard_map or a collective that cannot be planned.
    """
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    for op in graph.operators():
        if op.kind != SHARD_MAP:
            continue
        own = _shape(op.params["mesh"])
        if any(sizes.get(name) != own.size_of(name) for name in own.axis_names):
            raise ValueError(
                f"The axes of a shard_map in the step must be axes of the mesh that "
                f"the step is planned on, but the shard_map at {op.source} is on "
                f"{own} and the step on {mesh}; "
                f"call autopar.parallelize(step, mesh={str(own)!r})."
            )
        tuple(body_collectives(op, mesh, Surroundings()))
        free = [n for n in own.axis_names if n not in op.params["newly_manual_axes"]]
        if any(sizes[name] > 1 for name in free):
            warnings.warn(
                f"The shard_map at {op.source} leaves the axes {', '.join(free)} to "
                f"the compiler, so that devices along them repeat its work.",
                FallbackWarning,
                stacklevel=2,
            )


def body_collectives(
    op: Operator, mesh: MeshShape, around: Surroundings
) -> Iterator[tuple[Collective, tuple[str, ...]]]:
    """Each collective in the body of a shard_map, with the axes it runs over.

    Raises:
      NotImplementedError: the body holds one that a plan cannot state.
    """
    for eqn, inside in _equations(op.params["jaxpr"], around):
        if eqn.primitive.name in COLLECTIVES:
            yield from _collective(eqn, mesh, inside)
        elif eqn.primitive.name == SHARD_MAP or _names_axes(eqn, mesh):
            raise NotImplementedError(
                f"A shard_map in the step may hold the collectives "
                f"{', '.join(sorted(COLLECTIVES))}, but the one at {source_line(eqn)} "
                f"holds {eqn.primitive.name!r}, whose traffic a plan cannot state yet; "
                f"write it with those, or call it outside of the parallelized step."
            )


def body_work(op: Operator, cluster: Cluster) -> tuple[float, float]:
    """Flops and seconds of one execution of the body on one device."""
    num_flops = seconds = 0.0
    for eqn, inside in _equations(op.params["jaxpr"], Surroundings()):
        kind = eqn.primitive.name
        if kind in COLLECTIVES or kind == SHARD_MAP:
            continue
        shapes = [[a.aval.shape for a in atoms] for atoms in (eqn.invars, eqn.outvars)]
        count = inside.count * (ASSUMED_TRIPS if inside.unbounded else 1)
        own = flops(kind, eqn.params, *shapes)
        avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
        moved = sum(aval.size * aval.dtype.itemsize for aval in avals)
        dtype = avals[0].dtype if avals else "float32"
        num_flops += count * own
        seconds += count * operator_seconds(kind, own, moved, dtype, cluster)
    return num_flops, seconds


def _equations(closed: Any, around: Surroundings) -> Iterator[tuple[Any, Surroundings]]:
    """Equations of a body, calls and loops entered, with what stands around them."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        kind, params = eqn.primitive.name, eqn.params
        if kind in CALLS:
            yield from _equations(callee(eqn), around)
        elif kind == "scan":
            yield from _equations(params["jaxpr"], around.in_loop(params["length"]))
        elif kind == "while":
            for name in ("cond_jaxpr", "body_jaxpr"):
                yield from _equations(params[name], around.in_loop(None))
        elif kind == "cond":
            for branch in params["branches"]:
                yield from _equations(branch, around.in_branch())
        else:
            yield eqn, around


def _names_axes(eqn: Any, mesh: MeshShape) -> bool:
    if eqn.primitive.name in _SILENT:
        return False
    return any(
        name in mesh.axis_names
        for param in _AXIS_PARAMS
        for name in _axes(eqn.params.get(param, ()))
    )


def _axes(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _collective(
    eqn: Any, mesh: MeshShape, around: Surroundings
) -> Iterator[tuple[Collective, tuple[str, ...]]]:
    kind, reduction, scale = COLLECTIVES[eqn.primitive.name]
    params = eqn.params
    named = _axes(params.get("axes", params.get("axis_name")))
    axes = tuple(axis for axis in named if isinstance(axis, str))
    groups = _groups(mesh, axes, params.get("axis_index_groups"))
    size = len(groups[0])
    if kind == "collective_permute":
        groups = tuple((g[s], g[t]) for g in groups for s, t in params["perm"])
    for var in eqn.invars:
        num_bytes = round(var.aval.size * var.aval.dtype.itemsize * scale(size))
        found = Collective(
            kind,
            groups,
            var.aval.dtype.name,
            num_bytes,
            around.count,
            reduction,
            f"shard_map {source_line(eqn)}",
            around.conditional,
            around.unbounded,
        )
        yield found, axes


def _groups(
    mesh: MeshShape, axes: Sequence[str], subgroups: Sequence[Sequence[int]] | None
) -> Groups:
    """Devices that communicate, in the order of `axes`; some of each if `subgroups`."""
    inside = [mesh.index_of(axis) for axis in axes]
    outside = [axis for axis in range(mesh.num_axes) if axis not in inside]
    ids = np.transpose(mesh.device_ids(), outside + inside)
    size = int(np.prod([mesh.axis_sizes[axis] for axis in inside]))
    groups = [tuple(map(int, row)) for row in ids.reshape(-1, size)]
    if subgroups is None:
        return tuple(groups)
    return tuple(tuple(g[i] for i in part) for g in groups for part in subgroups)
