"""Programs that create a step's state in its place, from an ordinary init function.

The init function is traced once. For each mesh there is one program: of the leaves that
live there, pinned to where the step wants them, and of nothing else. Every device makes
its own part, random numbers included, so nothing is whole anywhere or sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..clusters.cluster import Cluster
from ..costs.resharding import Resharder
from ..graph.blocks import as_array
from ..graph.build_graph import SCAN
from ..graph.dependencies import leading_to, tensors_of
from ..graph.op_graph import Operand, OpGraph
from ..graph.traced_function import TracedFunction, root_of
from ..lowering.host_memory import HOST
from ..lowering.programs import SpmdProgram, build_program
from ..planner.intra_op import plan_intra_op
from ..planner.traced_init import TracedInit
from ..planner.whole_step import roles_of
from ..sharding.mesh import MeshShape
from ..sharding.pin_primitive import pin
from ..state.array_chunks import join_leaf
from ..state.placements import LeafHome, LeafPart, placed_type
from ..transforms.chunk_flow import ChunkFlow, Cut
from ..transforms.chunked_step import ChunkRunner
from .pipeline import Pipeline
from .step_parts import graph_of

# A collective is never worth its launch: what a device needs, it can make.
_LAUNCH_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class InitProgram:
    """Makes parts of the state on one mesh.

    `program` takes the values of `TracedInit` at `inputs` and returns, for each of
    `outputs`, that part of a leaf: the leaf's number in the state, and the part.
    """

    program: SpmdProgram
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, LeafPart], ...]


@dataclass(frozen=True, eq=False)
class PlacedInit:
    """An init function, and the home of every leaf of its result."""

    init: TracedInit
    homes: tuple[LeafHome, ...]

    @staticmethod
    def of(
        init: TracedInit,
        leaves: Sequence[Any],
        homes: Sequence[LeafHome],
        traced: TracedFunction,
    ) -> PlacedInit:
        """Homes by those of all `leaves` of a step, which has the init's types there.

        Raises:
          ValueError: some state of the step was given with the batch.
        """
        position = {id(leaf): i for i, leaf in enumerate(leaves)}
        own = [position[id(kind)] for kind in init.types]
        roles, paths = roles_of(traced).roles, traced.input_paths
        state = (i for i, role in enumerate(roles) if role == "state")
        other = next((paths[i] for i in state if i not in set(own)), None)
        if other is not None:
            some = ", ".join(dict.fromkeys(root_of(paths[i]) for i in own))
            raise ValueError(
                f"init_fn must return the whole state of the step, which are the "
                f"arguments that the step returns again with the same tree, shapes and "
                f"dtypes; but it returned {some}, and {other}, which is state, was "
                f"given with `batch`. Let it return a tuple of all state arguments."
            )
        return PlacedInit(init, tuple(homes[i] for i in own))


def placed_state(placed: PlacedInit) -> Any:
    """The state with the type and place of every leaf instead of the leaf."""
    pairs = zip(placed.init.types, placed.homes, strict=True)
    return placed.init.state([placed_type(kind, home) for kind, home in pairs])


def whole_homes(program: SpmdProgram) -> list[LeafHome]:
    """The home of every leaf of a step on one mesh."""
    return [(LeafPart(sharding),) for sharding in program.shardings]


def stage_homes(pipeline: Pipeline) -> list[LeafHome]:
    """The home of every leaf of a pipelined step, on stage 0 if no stage reads it."""
    shardings = pipeline.program.shardings
    first = next(x for (_, stage), x in shardings.items() if stage == 0)
    anywhere = NamedSharding(first.mesh, PartitionSpec())
    paths, homes = iter(pipeline.chunked.traced.input_paths), []
    for lengths in pipeline.chunked.input_lengths:
        ends = [*itertools.accumulate(lengths or ())]
        rows = [*itertools.pairwise([0, *ends])] if lengths else [None]
        homes.append(
            tuple(LeafPart(pipeline.home(next(paths)) or anywhere, r) for r in rows)
        )
    return homes


def init_programs(placed: PlacedInit, cluster: Cluster) -> tuple[InitProgram, ...]:
    """A program for each mesh, which may be abstract, that has some of the state."""
    by_mesh: dict[Any, list[tuple[int, LeafPart]]] = {}
    for leaf, home in enumerate(placed.homes):
        for part in home:
            by_mesh.setdefault(part.sharding.mesh, []).append((leaf, part))
    return tuple(
        _init_program(placed, mesh, parts, cluster) for mesh, parts in by_mesh.items()
    )


def made_state(init: TracedInit, made: Mapping[InitProgram, Sequence[Any]]) -> Any:
    """The state, of what each program made."""
    parts: list[list[tuple[LeafPart, Any]]] = [[] for _ in init.types]
    for program, arrays in made.items():
        for (leaf, part), array in zip(program.outputs, arrays, strict=True):
            parts[leaf].append((part, array))
    return init.state([_joined(each) for each in parts])


def _joined(parts: list[tuple[LeafPart, Any]]) -> Any:
    parts.sort(key=lambda each: each[0].rows or (0, 0))
    return join_leaf([array for _, array in parts])


def _init_program(
    placed: PlacedInit,
    mesh: Any,
    parts: Sequence[tuple[int, LeafPart]],
    cluster: Cluster,
) -> InitProgram:
    init, graph = placed.init, placed.init.graph
    wanted = [graph.outputs[leaf] for leaf, _ in parts]
    cuts = [_cut_of(placed.homes[leaf]) for leaf, _ in parts]
    flow = _flow(graph, dict(zip(wanted, cuts, strict=True)))
    operators = leading_to(tensors_of(wanted), graph.blocks[0].operators)
    read = {t for op in operators for t in tensors_of(op.operands)}
    read |= set(tensors_of(wanted))
    inputs = [i for i, given in enumerate(graph.inputs) if given.tensor in read]
    tensors = [graph.inputs[i].tensor for i in inputs]

    def make(*values: Any) -> list[Any]:
        runner = ChunkRunner(graph, flow)
        runner.values.update(zip(tensors, values, strict=True))
        runner.run_operators(operators)
        found = []
        for operand, cut, (_, part) in zip(wanted, cuts, parts, strict=True):
            if cut is None or part.rows is None:
                x = as_array(runner.value(operand))
            else:
                x = runner.chunks_of(operand, cut)[cut.borders().index(part.rows)]
            found.append(_pinned(x, part.sharding.spec))
        return found

    make.__name__ = f"init_{init.traced.name}"
    kinds = [graph.tensors[tensor].type for tensor in tensors]
    structs = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]
    names = [graph.inputs[i].path for i in inputs]
    part = graph_of(make, structs, names, [init.paths[leaf] for leaf, _ in parts])
    shape = MeshShape(tuple(mesh.axis_names), tuple(mesh.axis_sizes))
    silent = replace(cluster, launch_seconds=_LAUNCH_SECONDS)
    plan = plan_intra_op(part, shape, silent).plan
    weak = [i for i, (leaf, _) in enumerate(parts) if init.types[leaf].weak_type]
    program = build_program(
        *(part, plan, Resharder(shape, silent), mesh, structs, (), (), weak),
        [i for i, (_, home) in enumerate(parts) if home.sharding.memory_kind == HOST],
    )
    return InitProgram(program, tuple(inputs), tuple(parts))


def _cut_of(home: LeafHome) -> Cut | None:
    rows = [part.rows for part in home if part.rows is not None]
    return Cut(0, tuple(end - first for first, end in rows)) if rows else None


def _flow(graph: OpGraph, cuts: Mapping[Operand, Cut | None]) -> ChunkFlow:
    """Which values come in chunks, so that none is made whole for a chunk of it."""
    wanted = {t: cut for t, cut in cuts.items() if cut and isinstance(t, int)}
    inputs = frozenset(graph.blocks[0].inputs)
    lengths: dict[int, tuple[int, ...]] = {}
    while True:
        flow = ChunkFlow(
            graph, dict(lengths), inputs, wanted=dict(wanted), is_step=False
        )
        flow.run()
        asked = {
            op.index: flow.wanted[t].lengths
            for op in graph.blocks[0].operators
            for t in op.results
            if op.kind == SCAN and t in flow.wanted and op.index not in lengths
        }
        if not asked:
            return flow
        lengths.update(asked)


def _pinned(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x  # lies whole on every device
    return pin(x, spec)
