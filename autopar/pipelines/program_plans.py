"""Plan every program of a pipelined step, each for its stage's submesh.

Forward, planned alone, would split the batch and keep every parameter whole, as it
never sees a gradient. So forward and backward of a stage are first planned as one
program: it says where parameters, gradients and what comes in lie, and in what spec
backward reads what forward makes. Each program is then planned for itself within that.
Programs that differ in names alone are planned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

import numpy as np

from ..clusters.cluster import Cluster
from ..errors import PlanFileError
from ..graph.dependencies import tensors_of
from ..graph.op_graph import (
    Constant,
    GraphInput,
    Operand,
    Operator,
    OpGraph,
    TensorType,
    params_key,
)
from ..lowering.programs import Slot, SlotKind, TaskKind
from ..methods.restrictions import Limit, Restriction
from ..planner.intra_op import plan_intra_op
from ..plans.plan import ShardingPlan
from ..plans.plan_check import check_against
from ..plans.staged_plan import StageProgramPlan
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.spec import REPLICATED, Spec, State, axes_of_dim, pending_axes
from .cut_programs import (
    Piece,
    PlannedPiece,
    TracedPiece,
    check_operands,
    graph_of_piece,
    joint_piece,
    made_nowhere,
    outputs_at_host,
    own_sums,
    reads_of,
    stages_of,
)
from .stage_cut import StageCut, made_again
from .stage_demands import StageInside, StagePins, StageRules
from .step_parts import COUNTER, StepParts
from .update_cut import ApplyCut


@dataclass
class PipelineBuilder:
    """Collects the pieces of a step and plans them, stage by stage.

    `shapes` are the meshes of the stages; `given`, if there, are plans to use for the
    pieces as they are, in order. State of the stages in `split` lies in as many parts
    as they have devices. `wanted` are the specs in which a stage returns values, `sums`
    what may be added up over microbatches in parts, every device its own.
    """

    parts: StepParts
    cut: StageCut
    apply: ApplyCut
    cluster: Cluster
    shapes: Sequence[MeshShape]
    state_outputs: Mapping[str, str]  # output path by state leaf
    pins: StagePins
    given: Sequence[StageProgramPlan] | None
    kept: frozenset[str]  # leaves whose buffers are not reused
    split: frozenset[int]
    planner: StagePlanner  # knows plans of equal programs
    remat: str = ""  # what backward programs make again
    inside: StageInside | None = None  # where it has a name
    rules: StageRules | None = None
    wanted: dict[tuple[str, int], Spec] = field(default_factory=dict)
    specs: dict[tuple[str, int], Spec] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    host: set[str] = field(default_factory=set)  # slots in the host's memory
    sums: frozenset[str] = frozenset()
    clusters: Sequence[Cluster] = ()  # of each stage, where they are of several
    devices: Sequence[range] = ()  # of each stage, if they are known

    def build(self) -> list[PlannedPiece]:
        """Plan all pieces; those of one stage agree on the specs they share.

        Raises:
          PlanFileError: the given plans are of another step.
          ValueError: a pin of a leaf is of other stages than the leaf's own.
          NotImplementedError: a program lacks an operand.
        """
        pieces = [*self.microbatch_pieces(), *self.apply_pieces()]
        check_operands(pieces, self.slots, (*self.parts.batch, COUNTER))
        homes = stages_of(pieces, self.slots)
        self.pins.check_stages(homes, self.shapes, self.devices)
        self.sums = own_sums(pieces, self.slots)
        if self.given is None:
            for stage in range(self.cut.num_stages):
                self.plan_jointly([each for each in pieces if each.stage == stage])
            return [self.plan_piece(piece, None) for piece in pieces]
        planned = [f"stage {each.stage}, {each.kind}" for each in self.given]
        wanted = [f"stage {piece.stage}, {piece.kind}" for piece in pieces]
        if planned != wanted:
            raise PlanFileError(
                f"a plan of a pipeline must fit the step it runs, but has the programs "
                f"{planned} and the step has {wanted}; plan again with step.plan(...)."
            )
        return [
            self.plan_piece(piece, each.sharding)
            for piece, each in zip(pieces, self.given, strict=True)
        ]

    def microbatch_pieces(self) -> list[Piece]:
        graph, cut = self.parts.microbatch, self.cut
        names = {t.index: t.name for t in graph.tensors}
        stages = range(cut.num_stages)
        tasks: list[tuple[int, TaskKind, tuple[Operator, ...]]] = [
            *((s, "forward", cut.forward[s]) for s in stages),
            *((s, "backward", cut.backward[s]) for s in stages),
            *((s, "weight", cut.weight[s]) for s in stages),
        ]
        nowhere = made_nowhere(graph, cut)
        if nowhere:
            last = cut.num_stages - 1
            needed = {op.index for op in (*cut.forward[last], *nowhere)}
            operators = tuple(o for o in graph.blocks[0].operators if o.index in needed)
            tasks[last] = (last, "forward", operators)
        reads = {task[:2]: reads_of(task[2]) for task in tasks}
        again = {(s, "weight"): made_again(cut, s) for s in stages}
        made = {t for op in graph.blocks[0].operators for t in op.results}
        handed_on = [operand for operand in graph.outputs if operand not in made]
        for tensor in tensors_of(handed_on):
            if tensor not in reads[cut.num_stages - 1, "forward"]:
                reads[cut.num_stages - 1, "forward"].append(tensor)
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
            own: set[int | Constant] = {
                t for t, made in cut.made_on.items() if made == (stage, kind)
            }
            elsewhere = {
                t
                for key, found in reads.items()
                if key != (stage, kind)
                for t in found
                if t not in again.get(key, ())
            }
            outputs: dict[str, int | Constant] = {}
            for tensor in sorted(elsewhere.intersection(cut.made_on, own)):
                outputs[names[tensor]] = tensor
                self.slot(names[tensor], "activation", stage)
            if kind == "backward":
                for tensor in sorted(again[stage, "weight"]):
                    outputs[f"again {names[tensor]}"] = tensor
                    self.slot(f"again {names[tensor]}", "activation", stage)
            added: dict[str, State] = {}
            if (stage, kind) == (cut.num_stages - 1, "forward"):
                own.update(t for op in nowhere for t in op.results)
                own.update(handed_on)
            for name, operand in zip(graph.output_paths, graph.outputs, strict=True):
                if operand in own:
                    outputs[name] = operand
                    is_sum = name in self.parts.sums
                    self.slot(name, "gradient" if is_sum else "result", stage)
                    if is_sum:
                        added[name] = self.parts.sums[name]
            handed = again.get((stage, kind), ())
            inputs = {
                f"again {names[t]}" if t in handed else names[t]: t
                for t in reads[stage, kind]
            }
            if operators or outputs:
                pieces.append(Piece(stage, kind, operators, inputs, outputs, added))
        missing = set(graph.output_paths) - set(self.slots)
        assert not missing, f"no stage makes {', '.join(sorted(missing))}"
        return pieces

    def apply_pieces(self) -> list[Piece]:
        graph, cut = self.parts.apply, self.apply
        names = {t.index: t.name for t in graph.tensors}
        for graph_input in graph.inputs:
            if graph_input.path in self.parts.held:
                self.slot(graph_input.path, "state", cut.home[graph_input.tensor])
        leaf_of = {output: leaf for leaf, output in self.state_outputs.items()}
        last_round = {stage: (stage, number) for stage, number in sorted(cut.operators)}
        passing = self.passing(last_round)
        tasks = {**dict.fromkeys(passing.values(), ()), **cut.operators}
        reads = {key: reads_of(ops) for key, ops in tasks.items()}
        for position, key in passing.items():
            operand = graph.outputs[position]
            if isinstance(operand, int) and operand not in reads[key]:
                reads[key].append(operand)
        for (stage, _), found in reads.items():
            for tensor in found:
                if names[tensor] in self.parts.prepared:
                    self.slot(names[tensor], "state", stage)
        passed: dict[int, dict[str, int]] = {}
        pieces = []
        for key, operators in sorted(tasks.items(), key=lambda item: item[0][1]):
            stage, _ = key
            own = {t for t, made in cut.made_on.items() if made == key}
            crossing = {t for k, found in reads.items() if k != key for t in found}
            outputs: dict[str, int | Constant] = {}
            for tensor in sorted(own & crossing):
                outputs[f"apply {names[tensor]}"] = tensor
                self.slot(f"apply {names[tensor]}", "activation", stage)
            for position, (path, operand) in enumerate(
                zip(graph.output_paths, graph.outputs, strict=True)
            ):
                if operand not in own and passing.get(position) != key:
                    continue
                name = leaf_of.get(path, path)
                if name == path:
                    self.slot(name, "result", stage)
                elif operand in own and key != last_round[stage]:
                    # A later round may still read the old value: it hands on the new.
                    assert isinstance(operand, int)
                    passed.setdefault(stage, {})[name] = operand
                    name = f"apply {names[operand]}"
                    self.slot(name, "activation", stage)
                outputs[name] = operand
            inputs = {}
            for tensor in reads[key]:
                made = cut.made_on.get(tensor)
                name = names[tensor] if made is None else f"apply {names[tensor]}"
                inputs[name] = tensor
            if key == last_round.get(stage):
                for name, tensor in passed.get(stage, {}).items():
                    inputs[f"apply {names[tensor]}"] = tensor
                    outputs[name] = tensor
            pieces.append(Piece(stage, "apply", operators, inputs, outputs))
        return pieces

    def passing(
        self, last_round: Mapping[int, tuple[int, int]]
    ) -> dict[int, tuple[int, int]]:
        """Where outputs that no operator makes are handed on, by position.

        Those are literals, raw sums, and leaves that become something else: a leaf that
        stays where it is needs no program.
        """
        graph = self.parts.apply
        found = {}
        for position, (path, operand) in enumerate(
            zip(graph.output_paths, graph.outputs, strict=True)
        ):
            is_unchanged = self.unchanged(path) is not None
            if not is_unchanged and operand not in self.apply.made_on:
                stage = self.apply.output_stage[position]
                found[position] = last_round.get(stage, (stage, 0))
        return found

    def unchanged(self, path: str) -> str | None:
        """The leaf that an output of apply is, if that leaf is not updated."""
        paths, by_path = self._apply_paths
        leaf = paths.get(by_path[path])  # type: ignore[arg-type]
        if leaf is None or leaf in self.parts.sums or leaf in self.parts.prepared:
            return None
        next_value = by_path.get(self.state_outputs.get(leaf, ""))
        is_kept = next_value is None or paths.get(next_value) == leaf  # type: ignore[arg-type]
        return leaf if is_kept else None

    @cached_property
    def _apply_paths(self) -> tuple[dict[int, str], dict[str, int | Constant]]:
        """The path of each input of apply, by tensor; its outputs by path."""
        graph = self.parts.apply
        paths = {i.tensor: i.path for i in graph.inputs}
        return paths, dict(zip(graph.output_paths, graph.outputs, strict=True))

    def slot(self, name: str, kind: SlotKind, stage: int) -> None:
        self.slots.setdefault(name, Slot(name, kind, stage))

    def plan_jointly(self, pieces: Sequence[Piece]) -> ShardingPlan | None:
        """Plan forward and backward of a stage as one; later plans keep to it.

        None for a stage that has one of them alone.
        """
        joint = joint_piece(
            [each for each in pieces if each.kind != "apply"], self.parts.microbatch
        )
        if joint is None:
            return None
        part = self.trace_piece(joint).graph
        plan, stage = self.solve(joint, part, self.planner.joint_gap), joint.stage
        for each in plan.inputs:
            self.specs.setdefault((each.path, stage), each.spec)
        read = specs_read(plan, part)
        for position, (slot, operand) in enumerate(
            zip(part.output_paths, part.outputs, strict=True)
        ):
            if isinstance(operand, int) and slot not in joint.added:
                spec = plan.outputs[0][position]
                self.wanted[slot, stage] = read.get(operand, spec)
        return plan

    def trace_piece(self, piece: Piece) -> TracedPiece:
        """The graph of a piece, whose inputs and outputs are slots in order."""
        graph = self.parts.apply if piece.kind == "apply" else self.parts.microbatch
        traced = graph_of_piece(piece, graph, piece.ties(self.slots))
        part = self.with_roles(traced.graph, self.parts.step.num_microbatches)
        return replace(traced, graph=part)

    def with_roles(self, part: OpGraph, num_microbatches: int) -> OpGraph:
        """The graph of a piece told what lies at the host and what may be parts."""

        def told(each: GraphInput) -> GraphInput:
            if each.path in self.host:
                return replace(each, memory="host")
            if each.path in self.sums and num_microbatches > 1:
                return replace(each, role="sum", num_runs=num_microbatches)
            return each

        return replace(part, inputs=tuple(map(told, part.inputs)))

    def plan_piece(self, piece: Piece, given: ShardingPlan | None) -> PlannedPiece:
        traced = self.trace_piece(piece)
        part, names = traced.graph, traced.inputs
        plan = given or self.solve(piece, part)
        if given is not None:
            check_against(given, part)
        elif piece.kind == "backward":
            plan = replace(plan, remat=self.remat)
        at_host = outputs_at_host(part)
        host_outputs = (
            i
            for i, name in enumerate(piece.outputs)
            if i in at_host or (name in self.host and self.slots[name].kind == "state")
        )
        planned = PlannedPiece(
            piece,
            part,
            plan,
            traced.structs,
            names,
            tuple(piece.outputs),
            tuple(
                i
                for i, (name, tie) in enumerate(zip(names, traced.ties, strict=True))
                if tie is not None and name not in self.kept
            ),
            tuple(host_outputs),
        )
        self.host.update(planned.host_slots)
        self.note(planned)
        return planned

    def solve(self, piece: Piece, part: OpGraph, gap: float = 1e-4) -> ShardingPlan:
        """The plan of a program, which keeps to the specs that are settled."""
        shape, stage = self.shapes[piece.stage], piece.stage
        kept = {
            i.tensor: pin_of(self.specs[i.path, stage], part, i.tensor)
            for i in part.inputs
            if (i.path, stage) in self.specs
        }
        pins = {**self.pins.of_piece(part, shape), **kept}
        returned = {
            operand: self.wanted[path, stage]
            for path, operand in zip(part.output_paths, part.outputs, strict=True)
            if isinstance(operand, int) and (path, stage) in self.wanted
        }
        split = [
            i.tensor
            for i in part.inputs
            if stage in self.split and self.slots[i.path].kind in ("state", "gradient")
        ]
        cluster = self.clusters[stage] if self.clusters else None
        asked = pins, returned, split, gap, self.demands(part, shape, kept), cluster
        return self.planner.plan(part, shape, *asked)

    def demands(
        self, part: OpGraph, mesh: MeshShape, settled: Collection[int] = ()
    ) -> list[Restriction]:
        """What the inside of stages and layout rules leave; see `StageRules`."""
        found = [] if self.inside is None else [self.inside.restriction(part, mesh)]
        if self.rules is not None:
            found.append(self.rules.restriction(part, mesh, settled))
        return found

    def note(self, planned: PlannedPiece) -> None:
        """Remember the specs of slots, which later pieces of the stage keep to."""
        stage = planned.piece.stage
        for i in planned.plan.inputs:
            self.specs.setdefault((i.path, stage), i.spec)
        for path, spec in zip(planned.outputs, planned.plan.outputs[0], strict=True):
            self.specs.setdefault((path, stage), spec)
        for name, kind in zip(planned.outputs, planned.output_types, strict=True):
            self.types.setdefault(name, kind)
        for name, struct in zip(planned.inputs, planned.structs, strict=True):
            self.types.setdefault(name, TensorType(struct.shape, struct.dtype))


@dataclass
class StagePlanner:
    """Plans programs on submeshes of a cluster; equal ones once.

    `joint_gap` is enough for forward and backward as one, whose plan is not run.
    `limits_of` says what more a program is forbidden; such are planned every time.
    """

    cluster: Cluster
    joint_gap: float = 1e-4
    known: dict[Hashable, ShardingPlan] = field(default_factory=dict)
    limits_of: Callable[[OpGraph], Sequence[Limit]] | None = None

    def plan(
        self,
        graph: OpGraph,
        mesh: MeshShape,
        pins: Mapping[int, Pin],
        returned: Mapping[int, Spec],
        split: Collection[int] = (),
        gap: float = 1e-4,
        demands: Sequence[Restriction] = (),
        cluster: Cluster | None = None,
    ) -> ShardingPlan:
        """The cheapest plan of a program.

        Arguments:
          pins: where arguments lie, by tensor.
          returned: the spec in which results are to be returned, by tensor.
          split: arguments that are to lie in as many parts as there are devices.
          demands: what its inside must be, where that has a name or rules.
          cluster: what the submesh is of, if that is another.
        """
        cluster = cluster or self.cluster
        limits = (*restrictions(graph, mesh, pins, returned, split), *demands)
        more = () if self.limits_of is None else self.limits_of(graph)
        key = (
            *(fingerprint(graph), mesh, cluster, gap, tuple(sorted(split))),
            tuple(sorted(pins.items(), key=itemgetter(0))),
            tuple(sorted(returned.items())),
            repr(demands),
        )
        if more or key not in self.known:
            found = plan_intra_op(
                graph,
                mesh,
                cluster,
                pins=pins,
                restrictions=(*limits, *more),
                gap=gap,
            )
            if not more:
                self.known[key] = found.plan
            return found.plan
        return renamed(self.known[key], graph)


def restrictions(
    graph: OpGraph,
    mesh: MeshShape,
    pins: Mapping[int, Pin],
    returned: Mapping[int, Spec],
    split: Collection[int],
) -> Sequence[Restriction]:
    """What a stage's programs leave to the solver."""
    wanted = {t: tuple(frozenset((s,)) for s in spec) for t, spec in returned.items()}
    homes = {
        t: (frozenset(range(graph.tensors[t].type.rank)),) * mesh.num_axes
        for t in split
        if t not in pins and graph.tensors[t].type.rank
    }
    if not wanted and not homes:
        return ()
    return (Restriction("the stage", {}, {}, homes, returned=wanted),)


def specs_read(plan: ShardingPlan, graph: OpGraph) -> dict[int, Spec]:
    """In which spec what forward makes is mostly read by backward, by tensor.

    `plan` is that of both as one program; no spec is pending.
    """
    reads: dict[int, Counter[Spec]] = {}
    phase_of = {
        t: "transpose(" in op.name for op in graph.operators() for t in op.results
    }
    for op, planned in zip(graph.operators(), plan.operators, strict=True):
        if "transpose(" not in op.name:
            continue
        for operand, spec in zip(op.operands, planned.operand_specs, strict=True):
            if not isinstance(operand, int) or phase_of.get(operand, True):
                continue
            if min(spec, default=0) >= REPLICATED:
                reads.setdefault(operand, Counter())[spec] += 1
    return {t: found.most_common(1)[0][0] for t, found in reads.items()}


def pin_of(spec: Spec, graph: OpGraph, tensor: int) -> Pin:
    """The pin that allows an argument one spec."""
    rank = graph.tensors[tensor].type.rank
    dims = tuple(axes_of_dim(spec, dim) for dim in range(rank))
    return Pin(dims, pending_axes(spec))


def fingerprint(graph: OpGraph) -> Hashable:
    """Equal for graphs that are equal but for names."""
    return (
        tuple((t.type, t.block) for t in graph.tensors),
        tuple(replace(i, path="") for i in graph.inputs),
        tuple(
            (
                (block.parent, block.trip_count, block.weight, block.conditional),
                block.unbounded,
                block.inputs,
                tuple(map(operand_key, block.outputs)),
                tuple(
                    (
                        *(op.kind, params_key(op.params), op.results, op.bodies),
                        tuple(map(operand_key, op.operands)),
                    )
                    for op in block.operators
                ),
            )
            for block in graph.blocks
        ),
    )


def renamed(plan: ShardingPlan, graph: OpGraph) -> ShardingPlan:
    """The plan of an equal graph, with the names of this one."""
    operators = graph.operators()
    sources: dict[str, str] = {}
    made_by = {t: op.source for op in operators for t in op.results}
    old_by = {
        t: each.source
        for op, each in zip(operators, plan.operators, strict=True)
        for t in op.results
    }
    for index, (tensor, old) in enumerate(
        zip(graph.tensors, plan.tensors, strict=True)
    ):
        before = f"{old.name} {old_by.get(index, '')}".strip()
        sources[before] = f"{tensor.name} {made_by.get(index, '')}".strip()
    return replace(
        plan,
        function=graph.name,
        inputs=tuple(
            replace(each, path=own.path)
            for each, own in zip(plan.inputs, graph.inputs, strict=True)
        ),
        operators=tuple(
            replace(each, name=op.name, source=op.source)
            for each, op in zip(plan.operators, operators, strict=True)
        ),
        tensors=tuple(
            replace(each, name=own.name)
            for each, own in zip(plan.tensors, graph.tensors, strict=True)
        ),
        collectives=tuple(
            replace(each, source=sources.get(each.source, each.source))
            for each in plan.collectives
        ),
    )


def operand_key(operand: Operand) -> Hashable:
    """The number of a tensor; equal for equal literals."""
    if not isinstance(operand, Constant):
        return operand
    value = operand.value
    whole = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return operand.type, repr(whole)
