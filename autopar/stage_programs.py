"""Plan and lower every program of a pipelined step, each on its stage's submesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from .cluster import Cluster
from .graph import Constant, Operator, OpGraph
from .intra_op import plan_intra_op
from .lowering.blocks import as_array
from .mesh import MeshShape
from .microbatch_flow import tensors_of
from .microbatch_loop import WholeRunner
from .pins import Pin
from .plan import ShardingPlan
from .programs import (
    PipelineProgram,
    Slot,
    SlotKind,
    SpmdProgram,
    StageProgram,
    TaskKind,
    build_program,
)
from .resharding import Resharder
from .spec import Spec, axes_of_dim, to_partition_spec
from .stage_apply import ApplyCut
from .stage_cut import StageCut
from .stage_trace import StepParts, graph_of


@dataclass(frozen=True, eq=False)
class Piece:
    """One stage program before it is planned: operators, what they read and return.

    Inputs and outputs come as slot names; `added` are outputs that an accumulator of
    the same name takes in.
    """

    stage: int
    kind: TaskKind
    operators: tuple[Operator, ...]
    inputs: dict[str, int]  # tensor by slot
    outputs: dict[str, int | Constant]  # by slot
    added: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class PlannedPiece:
    """A stage program with its plan, for the audit."""

    piece: Piece
    plan: ShardingPlan
    program: SpmdProgram


@dataclass
class PipelineBuilder:
    """Collects the pieces of a step and plans them, stage by stage."""

    parts: StepParts
    cut: StageCut
    apply: ApplyCut
    cluster: Cluster
    shapes: Sequence[MeshShape]
    meshes: Sequence[Mesh]
    num_microbatches: int
    state_outputs: Mapping[str, str]  # output path by state leaf
    specs: dict[tuple[str, int], Spec] = field(default_factory=dict)
    shardings: dict[tuple[str, int], NamedSharding] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    zeros: dict[str, Callable[[], Any]] = field(default_factory=dict)
    planned: list[PlannedPiece] = field(default_factory=list)

    def build(self) -> PipelineProgram:
        """Plan all pieces; those of one stage agree on the specs they share."""
        pieces = [*self.microbatch_pieces(), *self.apply_pieces()]
        programs = tuple(self.plan_piece(piece) for piece in pieces)
        return PipelineProgram(
            self.cut.num_stages,
            self.num_microbatches,
            self.slots,
            programs,
            self.shardings,
            self.zeros,
        )

    def microbatch_pieces(self) -> list[Piece]:
        graph, cut = self.parts.microbatch, self.cut
        names = {t.index: t.name for t in graph.tensors}
        stages = range(cut.num_stages)
        tasks: list[tuple[int, TaskKind, tuple[Operator, ...]]] = [
            *((s, "forward", cut.forward[s]) for s in stages),
            *((s, "backward", cut.backward[s]) for s in stages),
        ]
        reads = {task[:2]: _reads(task[2]) for task in tasks}
        for graph_input in graph.inputs:
            home = cut.home.get(graph_input.tensor)
            found = graph_input.tensor
            readers = [key[0] for key, tensors in reads.items() if found in tensors]
            if graph_input.path in self.parts.prepared and readers:
                self.slot(graph_input.path, "state", readers[0])
            elif home is not None:
                self.slot(graph_input.path, "state", home)
            elif readers and graph_input.path not in self.parts.held:
                self.slot(graph_input.path, "batch", 0)
        pieces = []
        for stage, kind, operators in tasks:
            own = {t for t, made in cut.made_on.items() if made == (stage, kind)}
            elsewhere = {
                t for key, found in reads.items() if key != (stage, kind) for t in found
            }
            outputs: dict[str, int | Constant] = {}
            for tensor in sorted(own & elsewhere):
                outputs[names[tensor]] = tensor
                self.slot(names[tensor], "activation", stage)
            added = []
            for name, operand in zip(self.parts.sums, graph.outputs, strict=True):
                if isinstance(operand, int) and operand in own:
                    outputs[name] = operand
                    self.slot(name, "gradient", stage)
                    added.append(name)
            inputs = {names[t]: t for t in reads[stage, kind]}
            if operators:
                pieces.append(
                    Piece(stage, kind, operators, inputs, outputs, tuple(added))
                )
        missing = set(self.parts.sums) - set(self.slots)
        if missing:
            raise NotImplementedError(
                f"Sums that do not come from a stage's work are not there yet: "
                f"{', '.join(sorted(missing))}."
            )
        return pieces

    def apply_pieces(self) -> list[Piece]:
        graph, cut = self.parts.apply, self.apply
        names = {t.index: t.name for t in graph.tensors}
        for graph_input in graph.inputs:
            if graph_input.path in self.parts.held:
                self.slot(graph_input.path, "state", cut.home[graph_input.tensor])
        leaf_of = {output: leaf for leaf, output in self.state_outputs.items()}
        reads = {key: _reads(ops) for key, ops in cut.operators.items()}
        for (stage, _), found in reads.items():
            for tensor in found:
                if names[tensor] in self.parts.prepared:
                    self.slot(names[tensor], "state", stage)
        last_round = {stage: (stage, number) for stage, number in sorted(cut.operators)}
        passed: dict[int, dict[str, int]] = {}
        pieces = []
        last = max(cut.operators, default=(self.cut.num_stages - 1, 0))
        for key, operators in sorted(
            cut.operators.items(), key=lambda item: item[0][1]
        ):
            stage, _ = key
            own = {t for t, made in cut.made_on.items() if made == key}
            crossing = {t for k, found in reads.items() if k != key for t in found}
            outputs: dict[str, int | Constant] = {}
            for tensor in sorted(own & crossing):
                outputs[f"apply {names[tensor]}"] = tensor
                self.slot(f"apply {names[tensor]}", "activation", stage)
            for path, operand in zip(graph.output_paths, graph.outputs, strict=True):
                is_here = operand in own if isinstance(operand, int) else key == last
                if not is_here:
                    continue
                name = leaf_of.get(path, path)
                if name == path:
                    self.slot(name, "result", stage)
                elif isinstance(operand, int) and key != last_round[stage]:
                    # A later round may still read the old value: it hands on the new.
                    passed.setdefault(stage, {})[name] = operand
                    name = f"apply {names[operand]}"
                    self.slot(name, "activation", stage)
                outputs[name] = operand
            inputs = {}
            for tensor in reads[key]:
                made = cut.made_on.get(tensor)
                name = names[tensor] if made is None else f"apply {names[tensor]}"
                inputs[name] = tensor
            if key == last_round[stage]:
                for name, tensor in passed.get(stage, {}).items():
                    inputs[f"apply {names[tensor]}"] = tensor
                    outputs[name] = tensor
            pieces.append(Piece(stage, "apply", operators, inputs, outputs))
        return pieces

    def slot(self, name: str, kind: SlotKind, stage: int) -> None:
        self.slots.setdefault(name, Slot(name, kind, stage))

    def plan_piece(self, piece: Piece) -> StageProgram:
        graph = self.parts.apply if piece.kind == "apply" else self.parts.microbatch
        names = [*piece.inputs, *piece.added]
        types = [graph.tensors[t].type for t in piece.inputs.values()]
        for name in piece.added:
            tensor = piece.outputs[name]
            assert isinstance(tensor, int)
            types.append(graph.tensors[tensor].type)
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]

        def task(*values: Any) -> list[Any]:
            runner = WholeRunner(graph)
            given = dict(zip(names, values, strict=True))
            runner.values.update({t: given[n] for n, t in piece.inputs.items()})
            runner.run_operators(piece.operators)
            found = []
            for name, operand in piece.outputs.items():
                value = as_array(runner.value(operand))
                found.append(given[name] + value if name in piece.added else value)
            return found

        task.__name__ = f"{piece.kind}_{piece.stage}"
        output_names = list(piece.outputs)
        ties = [
            output_names.index(name)
            if name in piece.outputs
            and (name in piece.added or self.slots[name].kind == "state")
            else None
            for name in names
        ]
        part = graph_of(task, structs, names, output_names, ties)
        shape, mesh = self.shapes[piece.stage], self.meshes[piece.stage]
        pins = {
            i.tensor: _pin(self.specs[i.path, piece.stage], len(i_type.shape))
            for i, i_type in zip(part.inputs, structs, strict=True)
            if (i.path, piece.stage) in self.specs
        }
        plan = plan_intra_op(part, shape, self.cluster, pins=pins).plan
        donated = [i for i, tie in enumerate(ties) if tie is not None]
        resharder = Resharder(shape, self.cluster)
        program = build_program(part, plan, resharder, mesh, structs, (), donated)
        self.planned.append(PlannedPiece(piece, plan, program))
        self.note(piece, plan, part, mesh, structs)
        return StageProgram(
            piece.stage,
            piece.kind,
            tuple(names),
            tuple(output_names),
            _runner_of(program),
            tuple(donated),
        )

    def note(
        self,
        piece: Piece,
        plan: ShardingPlan,
        part: OpGraph,
        mesh: Mesh,
        structs: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        """Remember the specs of slots, which later pieces of the stage keep to."""
        known = [(i.path, i.spec, len(i.shape)) for i in plan.inputs]
        for path, spec, operand in zip(
            part.output_paths, plan.outputs[0], part.outputs, strict=True
        ):
            rank = (
                operand.type.rank
                if isinstance(operand, Constant)
                else part.tensors[operand].type.rank
            )
            known.append((path, spec, rank))
        for name, spec, rank in known:
            if (name, piece.stage) not in self.specs:
                self.specs[name, piece.stage] = spec
                names = plan.mesh.axis_names
                sharding = NamedSharding(mesh, to_partition_spec(spec, rank, names))
                self.shardings[name, piece.stage] = sharding
        for i, struct in zip(part.inputs, structs, strict=True):
            if i.path in piece.added:
                sharding = self.shardings[i.path, piece.stage]
                self.zeros[i.path] = _zeros(struct, sharding)


def _reads(operators: Iterable[Operator]) -> list[int]:
    """Tensors that operators read and do not make, in order of first reading."""
    made: set[int] = set()
    read: dict[int, None] = {}
    for op in operators:
        for tensor in tensors_of(op.operands):
            if tensor not in made:
                read[tensor] = None
        made.update(op.results)
    return list(read)


def _pin(spec: Spec, rank: int) -> Pin:
    return Pin(tuple(axes_of_dim(spec, dim) for dim in range(rank)))


def _zeros(struct: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Callable[[], Any]:
    return jax.jit(
        lambda: jnp.zeros(struct.shape, struct.dtype), out_shardings=sharding
    )


def _runner_of(program: SpmdProgram) -> Callable[[Sequence[Any]], Sequence[Any]]:
    def run(values: Sequence[Any]) -> Sequence[Any]:
        donated, kept = program.split(values)
        return program.jitted(donated, kept, list(program.constants))

    return run
