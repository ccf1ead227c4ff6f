"""A stage program before and after it is planned: what it runs, reads and returns.

The graphs of most are parts of a graph that is there: its operators, under the names
that tracing would give. What owns blocks, has effects or returns literals is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ..clusters.cluster import Cluster
from ..graph.build_graph import SHARD_MAP
from ..graph.dependencies import leading_to, tensors_of
from ..graph.op_graph import (
    Block,
    Constant,
    GraphInput,
    Operand,
    Operator,
    OpGraph,
    Tensor,
    TensorType,
)
from ..lowering.blocks import as_array
from ..lowering.partial_sums import held_shape
from ..lowering.programs import Slot, SpmdProgram, StageProgram, TaskKind, build_program
from ..microbatches.extremes import JOINS
from ..microbatches.microbatch_runners import RetracingRunner, WholeRunner
from ..plans.plan import ShardingPlan
from ..sharding.resharding import Resharder
from ..sharding.spec import SUM, State
from .stage_cut import StageCut
from .step_parts import graph_of

Run = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Piece:
    """One stage program before it is planned: operators, what they read and return.

    Inputs and outputs come as slot names; `added` are outputs that an accumulator of
    the same name takes in, as a sum or as the state says.
    """

    stage: int
    kind: TaskKind
    operators: tuple[Operator, ...]
    inputs: dict[str, int]  # tensor by slot
    outputs: dict[str, int | Constant]  # by slot
    added: Mapping[str, State] = field(default_factory=dict[str, State])

    @property
    def taken(self) -> dict[str, int | Constant]:
        """What its program takes, by slot: an accumulator is as what it takes in."""
        return {**self.inputs, **{name: self.outputs[name] for name in self.added}}

    def ties(self, slots: Mapping[str, Slot]) -> tuple[int | None, ...]:
        """The position of the output that each of `taken` becomes, if it becomes one:
        accumulators and state do."""
        order = list(self.outputs)
        return tuple(
            order.index(name)
            if name in self.outputs
            and (name in self.added or slots[name].kind == "state")
            else None
            for name in self.taken
        )


@dataclass(frozen=True, eq=False)
class PlannedPiece:
    """A stage program with its plan: lists of slots in, lists of slots out.

    `graph` computes it, `donated` are positions of inputs whose buffers it reuses,
    `host_outputs` of outputs that go to the host's memory.
    """

    piece: Piece
    graph: OpGraph
    plan: ShardingPlan
    structs: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    donated: tuple[int, ...]
    host_outputs: tuple[int, ...] = ()

    @property
    def host_slots(self) -> list[str]:
        """What the stage keeps in the host's memory while it runs other programs."""
        made = [self.outputs[i] for i in self.host_outputs]
        return made + [i.path for i in self.plan.inputs if i.memory == "host"]

    @property
    def output_types(self) -> list[TensorType]:
        """The type of each output."""
        return [self.graph.type_of(operand) for operand in self.graph.outputs]

    def running(self, run: Run) -> StageProgram:
        """The program in the dataflow of the step, where `run` executes it."""
        piece = self.piece
        names = piece.stage, piece.kind, self.inputs, self.outputs
        return StageProgram(*names, run, self.donated)

    def program(self, cluster: Cluster, mesh: Mesh | AbstractMesh) -> SpmdProgram:
        """The program on the devices of its stage."""
        resharder = Resharder(self.plan.mesh, cluster)
        sizes = self.plan.mesh.axis_sizes
        structs = [
            jax.ShapeDtypeStruct(held_shape(s.shape, each.spec, sizes), s.dtype)
            for s, each in zip(self.structs, self.plan.inputs, strict=True)
        ]
        return build_program(
            *(self.graph, self.plan, resharder, mesh, structs, (), self.donated),
            host_outputs=self.host_outputs,
        )


@dataclass(frozen=True, eq=False)
class TracedPiece:
    """The graph of a piece: its inputs are slots, some tied to outputs."""

    graph: OpGraph
    structs: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[str, ...]
    ties: tuple[int | None, ...]


def joint_piece(pieces: Sequence[Piece], graph: OpGraph) -> Piece | None:
    """All work of a stage on a microbatch as one piece; None if it is one already.

    What the pieces hand to each other is inside, and returned too.
    """
    if len(pieces) < 2:
        return None
    stage = pieces[0].stage
    made = {name for piece in pieces for name in piece.outputs}
    chosen = {op.index for piece in pieces for op in piece.operators}
    operators = tuple(op for op in graph.blocks[0].operators if op.index in chosen)
    inputs = {n: t for p in pieces for n, t in p.inputs.items() if n not in made}
    outputs = {n: operand for p in pieces for n, operand in p.outputs.items()}
    added = {n: state for piece in pieces for n, state in piece.added.items()}
    return Piece(stage, "backward", operators, inputs, outputs, added)


def stages_of(
    pieces: Iterable[Piece], slots: Mapping[str, Slot]
) -> dict[str, list[int]]:
    """The stages of each slot that comes from outside: its home, or its readers."""
    found: dict[str, list[int]] = {}
    for piece in pieces:
        for name in piece.inputs:
            slot = slots.get(name)
            if slot is not None and slot.kind in ("state", "batch"):
                is_home = slot.kind == "state"
                stage = slot.stage if is_home else piece.stage
                found.setdefault(name, []).append(stage)
    return found


def check_operands(
    pieces: Iterable[Piece], slots: Mapping[str, Slot], fed: Collection[str]
) -> None:
    """Refuse a cut in which a program makes, is sent and is given less than it reads.

    `fed` are the slots that come with each microbatch.

    Raises:
      NotImplementedError: it names the operator that lacks an operand.
    """
    pieces = list(pieces)
    given = {name for piece in pieces for name in piece.outputs}.union(fed)
    given.update(name for name, slot in slots.items() if slot.kind == "state")
    for piece in pieces:
        known = {t for name, t in piece.inputs.items() if name in given}
        for op in piece.operators:
            if not known.issuperset(tensors_of(op.operands)):
                raise NotImplementedError(
                    f"Every operand of a stage program is made in it, sent to it or "
                    f"given to the step, but {op.name!r} at "
                    f"{op.source or 'an unknown line'} reads one in the {piece.kind} "
                    f"program of stage {piece.stage} that is none of these; use "
                    f"another num_stages, or autopar.ShardParallel()."
                )
            known.update(op.results)


def own_sums(pieces: Iterable[Piece], slots: Mapping[str, Slot]) -> frozenset[str]:
    """Sums over microbatches that no other stage reads, by slot.

    Their parts on devices need not be added up before the update.
    """
    pieces = list(pieces)
    added = {name: each for piece in pieces for name, each in piece.added.items()}
    sums = {name for name, reduction in added.items() if reduction == SUM}
    return frozenset(sums) - {
        name
        for piece in pieces
        for name in piece.inputs
        if name in sums and slots[name].stage != piece.stage
    }


def outputs_at_host(graph: OpGraph) -> tuple[int, ...]:
    """Positions of outputs that operators leave in the host's memory.

    A policy of `jax.checkpoint` that offloads what it saves makes such residuals.
    """
    host = {
        tensor
        for op in graph.blocks[0].operators
        for tensor, var in zip(op.results, op.eqn.outvars, strict=True)
        if getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
    }
    return tuple(i for i, operand in enumerate(graph.outputs) if operand in host)


def made_nowhere(graph: OpGraph, cut: StageCut) -> list[Operator]:
    """Operators of outputs that no stage makes: of the batch alone, such as counts."""
    made_by = {t: op for op in graph.blocks[0].operators for t in op.results}
    found: dict[int, Operator] = {}
    waiting = [t for t in tensors_of(graph.outputs) if t not in cut.made_on]
    while waiting:
        tensor = waiting.pop()
        op = None if tensor in cut.made_on else made_by.get(tensor)
        if op is not None and op.index not in found:
            found[op.index] = op
            waiting.extend(tensors_of(op.operands))
    return list(found.values())


def reads_of(operators: Iterable[Operator]) -> list[int]:
    """Tensors that operators read and do not make, in order of first reading."""
    made: set[int] = set()
    read: dict[int, None] = {}
    for op in operators:
        for tensor in tensors_of(op.operands):
            if tensor not in made:
                read[tensor] = None
        made.update(op.results)
    return list(read)


_Ties = tuple[int | None, ...]


def graph_of_piece(piece: Piece, graph: OpGraph, ties: _Ties) -> TracedPiece:
    """The graph of a piece of `graph`, whose inputs and outputs are slots in order.

    `ties` are the outputs that inputs become, by position.
    """
    is_part = all(map(_is_kept, piece.operators)) and not any(
        isinstance(operand, Constant) for operand in piece.outputs.values()
    )
    found = (part_of if is_part else traced)(piece, graph, ties)
    return TracedPiece(found, _structs(piece, graph), tuple(piece.taken), ties)


def _is_kept(op: Operator) -> bool:
    """Whether tracing an operator again gives the same one."""
    is_own = op.eqn.primitive.name == op.kind  # not what a call became
    return is_own and not (op.bodies or op.eqn.effects or op.kind == SHARD_MAP)


def _structs(piece: Piece, graph: OpGraph) -> tuple[jax.ShapeDtypeStruct, ...]:
    types = map(graph.type_of, piece.taken.values())
    return tuple(jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in types)


def traced(piece: Piece, graph: OpGraph, ties: _Ties) -> OpGraph:
    """The graph of a piece of any operators."""
    names, structs = tuple(piece.taken), _structs(piece, graph)

    def task(*values: Any) -> list[Any]:
        runner = WholeRunner(graph)
        given = dict(zip(names, values, strict=True))
        return run_piece(piece, runner, given, lambda _, out: runner.value(out))

    task.__name__ = f"{piece.kind}_{piece.stage}"
    return graph_of(task, structs, names, list(piece.outputs), ties)


def run_piece(
    piece: Piece,
    runner: RetracingRunner,
    given: Mapping[str, Any],
    value_of: Callable[[str, Operand], Any],
) -> list[Any]:
    """The outputs of a piece, whose values by slot the runner has then."""
    runner.values.update({tensor: given[n] for n, tensor in piece.inputs.items()})
    runner.run_operators(piece.operators)
    found: list[Any] = []
    for name, operand in piece.outputs.items():
        value = as_array(value_of(name, operand))
        if name in piece.added:
            value = JOINS[piece.added[name]](given[name], value)
        found.append(value)
    return found


def part_of(piece: Piece, graph: OpGraph, ties: _Ties) -> OpGraph:
    """The same for a piece whose operators tracing gives back, and with its names."""
    part = _Part()
    given = {n: part.tensor(n, graph.type_of(o)) for n, o in piece.taken.items()}
    known = {tensor: given[name] for name, tensor in piece.inputs.items()}
    outputs = dict[str, int]()
    for op in leading_to(tensors_of(piece.outputs.values()), piece.operators):
        operands = [known[o] if isinstance(o, int) else o for o in op.operands]
        results = part.add(op, op.name.rpartition("/")[0], operands)
        known.update(zip(op.results, results, strict=True))
    for name, operand in piece.outputs.items():
        assert isinstance(operand, int)
        outputs[name] = known[operand]
        if name in piece.added:
            joining = _joining(graph.type_of(operand), piece.added[name])
            (outputs[name],) = part.add(joining, "", (given[name], known[operand]))
    block = Block(
        *(0, None, 1, 1.0, False, False, tuple(given.values())),
        tuple(outputs.values()),
        tuple(part.operators),
    )
    inputs = (
        GraphInput(tensor, name, "other" if tie is None else "state", tie)
        for (name, tensor), tie in zip(given.items(), ties, strict=True)
    )
    name = f"{piece.kind}_{piece.stage}"
    return OpGraph(name, tuple(part.tensors), (block,), tuple(inputs), tuple(outputs))


@dataclass
class _Part:
    """A graph of one block that grows operator by operator."""

    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    ordinals: dict[str, int] = field(default_factory=dict)

    def tensor(self, name: str, kind: TensorType) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, kind, 0))
        return len(self.tensors) - 1

    def add(
        self, op: Operator, scope: str, operands: Iterable[Operand]
    ) -> tuple[int, ...]:
        """The results of an operator that does the same on other operands."""
        stem = f"{scope}/{op.kind}" if scope else op.kind
        ordinal = self.ordinals[stem] = self.ordinals.get(stem, -1) + 1
        name, many = f"{stem}.{ordinal}", len(op.results) > 1
        results = tuple(
            self.tensor(f"{name}:{i}" if many else name, kind)
            for i, kind in enumerate(op.result_types)
        )
        index = len(self.operators)
        own = tuple(operands)
        self.operators.append(
            replace(op, index=index, name=name, operands=own, results=results, block=0)
        )
        return results


@lru_cache(maxsize=1024)
def _joining(kind: TensorType, reduction: State) -> Operator:
    """The sum or maximum of two arrays, as an operator."""
    struct = jax.ShapeDtypeStruct(kind.shape, kind.dtype)

    def task(before: Any, value: Any) -> list[Any]:
        return [JOINS[reduction](before, value)]

    graph = graph_of(task, (struct, struct), ("before", "value"), ("sum",))
    (op,) = graph.operators()
    return replace(op, source="")
