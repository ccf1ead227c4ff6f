"""The stage programs of a cut step before they are planned, and the graph of each.

The graphs of most are parts of a graph that is there: its operators, under the names
that tracing would give. What owns blocks, has effects or returns literals is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..graph.blocks import as_array
from ..graph.dependencies import leading_to, tensors_of
from ..graph.op_graph import (
    Constant,
    GraphInput,
    Operand,
    Operator,
    OpGraph,
)
from ..lowering.programs import Slot, SlotKind
from ..microbatches.extremes import JOINS
from ..microbatches.retracing import RetracingRunner, WholeRunner
from ..plans.plan import TaskKind
from ..sharding.spec import SUM, State
from .stage_cut import StageCut, made_again
from .step_parts import StepParts, graph_of
from .update_cut import ApplyCut

_Ties = tuple[int | None, ...]
_Key = tuple[int, int]  # stage and round of the update


@dataclass(frozen=True, eq=False)
class CutProgram:
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

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.kind}"

    @property
    def taken(self) -> dict[str, int | Constant]:
        """What its program takes, by slot: an accumulator is as what it takes in."""
        return {**self.inputs, **{name: self.outputs[name] for name in self.added}}

    def ties(self, slots: Mapping[str, Slot]) -> _Ties:
        """The position of the output that each of `taken` becomes, if it becomes one:
        accumulators and state do."""
        order = {name: position for position, name in enumerate(self.outputs)}
        return tuple(
            order[name]
            if name in order and (name in self.added or slots[name].kind == "state")
            else None
            for name in self.taken
        )


@dataclass(frozen=True, eq=False)
class CutPrograms:
    """All programs of a cut step in order, and the slots that they read and write.

    `sums` are sums over microbatches that no other stage reads, whose parts on devices
    need not be added up before the update. `unchanged` are result paths that are a leaf
    as it came, with its path.
    """

    parts: StepParts
    programs: tuple[CutProgram, ...]
    slots: Mapping[str, Slot]
    sums: frozenset[str]
    unchanged: Mapping[str, str]

    def of_stage(self, stage: int) -> list[CutProgram]:
        """The programs of a stage."""
        return [each for each in self.programs if each.stage == stage]

    def graph_of(self, program: CutProgram, host: Iterable[str]) -> OpGraph:
        """The graph of a program, whose inputs and outputs are slots in order.

        `host` are slots in the host's memory.
        """
        is_update = program.kind == "apply"
        graph = self.parts.apply if is_update else self.parts.microbatch
        part = program_graph(program, graph, program.ties(self.slots))
        return self.with_roles(part, host, self.parts.step.num_microbatches)

    def with_roles(
        self, part: OpGraph, host: Iterable[str], num_microbatches: int
    ) -> OpGraph:
        """The graph of a program told what lies at the host and what may be parts."""

        def told(each: GraphInput) -> GraphInput:
            if each.path in host:
                return replace(each, memory="host")
            if each.path in self.sums and num_microbatches > 1:
                return replace(each, role="sum", num_runs=num_microbatches)
            return each

        return replace(part, inputs=tuple(map(told, part.inputs)))

    def stages_of_leaves(self) -> dict[str, list[int]]:
        """The stages of each leaf, by path: its home if it is state, or its readers."""
        found: dict[str, list[int]] = {}
        for program in self.programs:
            for name in program.inputs:
                slot = self.slots.get(name)
                if slot is not None and slot.kind in ("state", "batch"):
                    is_state = slot.kind == "state"
                    stage = slot.stage if is_state else program.stage
                    found.setdefault(name, []).append(stage)
        return found


def check_operands(
    programs: Iterable[CutProgram], slots: Mapping[str, Slot], fed: Iterable[str]
) -> None:
    """Refuse a cut in which a program has less than it reads.

    `fed` are the slots that come with each microbatch.

    Raises:
      NotImplementedError: it names the operator that lacks an operand.
    """
    programs = list(programs)
    given = {name for program in programs for name in program.outputs}.union(fed)
    given.update(name for name, slot in slots.items() if slot.kind == "state")
    for program in programs:
        known = {t for name, t in program.inputs.items() if name in given}
        for op in program.operators:
            if not known.issuperset(tensors_of(op.operands)):
                raise NotImplementedError(
                    f"Every operand of a stage program is made in it, sent to it or "
                    f"given to the step, but {op.name!r} at "
                    f"{op.source or 'an unknown line'} reads one in the {program.kind} "
                    f"program of stage {program.stage} that is none of these; use "
                    f"another num_stages, or autopar.ShardParallel()."
                )
            known.update(op.results)


def cut_programs(
    parts: StepParts, cut: StageCut, apply: ApplyCut, next_paths: Mapping[str, str]
) -> CutPrograms:
    """The programs of a step: forward, backward, weight and apply of its stages.

    `next_paths` are the result paths of state leaves, by their path.
    """
    slots = _Slots()
    unchanged = _unchanged(parts, next_paths)
    programs = (
        *_microbatch_programs(parts, cut, slots),
        *_apply_programs(parts, apply, next_paths, unchanged, slots),
    )
    sums = _own_sums(programs, slots)
    return CutPrograms(parts, programs, slots, sums, unchanged)


class _Slots(dict[str, Slot]):
    def add(self, name: str, kind: SlotKind, stage: int) -> None:
        """A slot; the first of a name stays."""
        self.setdefault(name, Slot(name, kind, stage))


def _microbatch_programs(
    parts: StepParts, cut: StageCut, slots: _Slots
) -> list[CutProgram]:
    graph = parts.microbatch
    last: tuple[int, TaskKind] = (cut.num_stages - 1, "forward")
    names = {t.index: t.name for t in graph.tensors}
    phases: tuple[tuple[TaskKind, Any], ...] = (
        ("forward", cut.forward),
        ("backward", cut.backward),
        ("weight", cut.weight),
    )
    tasks: dict[tuple[int, TaskKind], tuple[Operator, ...]] = {
        (stage, kind): operators[stage]
        for kind, operators in phases
        for stage in range(cut.num_stages)
    }
    nowhere = _made_nowhere(graph, cut)
    if nowhere:
        needed = {op.index for op in (*cut.forward[last[0]], *nowhere)}
        operators = graph.blocks[0].operators
        tasks[last] = tuple(o for o in operators if o.index in needed)
    reads = {key: _reads_of(operators) for key, operators in tasks.items()}
    again = {(s, "weight"): made_again(cut, s) for s in range(cut.num_stages)}
    made = {t for op in graph.blocks[0].operators for t in op.results}
    handed_on = [operand for operand in graph.outputs if operand not in made]
    reads[last].update(dict.fromkeys(tensors_of(handed_on)))
    _leaf_slots(parts, cut, reads, slots)
    programs = []
    for key, operators in tasks.items():
        stage, kind = key
        own: set[int | Constant] = {t for t, on in cut.made_on.items() if on == key}
        elsewhere = {
            tensor
            for other, found in reads.items()
            if other != key
            for tensor in found
            if tensor not in again.get(other, ())
        }
        outputs: dict[str, int | Constant] = {
            names[t]: t for t in sorted(elsewhere.intersection(cut.made_on, own))
        }
        if kind == "backward":
            remade = sorted(again[stage, "weight"])
            outputs.update((f"again {names[tensor]}", tensor) for tensor in remade)
        for name in outputs:
            slots.add(name, "activation", stage)
        if key == last:
            own.update(t for op in nowhere for t in op.results)
            own.update(handed_on)
        added: dict[str, State] = {}
        for name, operand in zip(graph.output_paths, graph.outputs, strict=True):
            if operand in own:
                outputs[name] = operand
                slots.add(name, "gradient" if name in parts.sums else "result", stage)
                if name in parts.sums:
                    added[name] = parts.sums[name]
        handed = again.get(key, ())
        inputs = {
            f"again {names[t]}" if t in handed else names[t]: t for t in reads[key]
        }
        if operators or outputs:
            programs.append(CutProgram(stage, kind, operators, inputs, outputs, added))
    missing = set(graph.output_paths) - set(slots)
    assert not missing, f"no stage makes {', '.join(sorted(missing))}"
    return programs


def _leaf_slots(
    parts: StepParts,
    cut: StageCut,
    reads: Mapping[tuple[int, TaskKind], Mapping[int, None]],
    slots: _Slots,
) -> None:
    for each in parts.microbatch.inputs:
        home = cut.home.get(each.tensor)
        readers = [stage for (stage, _), found in reads.items() if each.tensor in found]
        if each.path in parts.prepared and readers:
            slots.add(each.path, "state", readers[0])
        elif home is not None:
            slots.add(each.path, "state", home)
        elif readers and each.path not in parts.held:
            slots.add(each.path, "batch", 0)


def _apply_programs(
    parts: StepParts,
    cut: ApplyCut,
    next_paths: Mapping[str, str],
    unchanged: Mapping[str, str],
    slots: _Slots,
) -> list[CutProgram]:
    graph = parts.apply
    names = {t.index: t.name for t in graph.tensors}
    for each in graph.inputs:
        if each.path in parts.held:
            slots.add(each.path, "state", cut.home[each.tensor])
    leaf_of = {output: leaf for leaf, output in next_paths.items()}
    last_round = {stage: (stage, number) for stage, number in sorted(cut.operators)}
    passing = _passing(graph, cut, unchanged, last_round)
    tasks = {**dict.fromkeys(passing.values(), ()), **cut.operators}
    reads = {key: _reads_of(operators) for key, operators in tasks.items()}
    for position, key in passing.items():
        reads[key].update(dict.fromkeys(tensors_of([graph.outputs[position]])))
    for (stage, _), found in reads.items():
        for tensor in found:
            if names[tensor] in parts.prepared:
                slots.add(names[tensor], "state", stage)
    passed: dict[int, dict[str, int]] = {}
    programs = []
    for key, operators in sorted(tasks.items(), key=lambda item: item[0][1]):
        stage, _ = key
        own = {t for t, made in cut.made_on.items() if made == key}
        crossing = {t for k, found in reads.items() if k != key for t in found}
        outputs: dict[str, int | Constant] = {
            f"apply {names[tensor]}": tensor for tensor in sorted(own & crossing)
        }
        for name in outputs:
            slots.add(name, "activation", stage)
        for position, (path, operand) in enumerate(
            zip(graph.output_paths, graph.outputs, strict=True)
        ):
            if operand not in own and passing.get(position) != key:
                continue
            name = leaf_of.get(path, path)
            if name == path:
                slots.add(name, "result", stage)
            elif operand in own and key != last_round[stage]:
                # A later round may still read the old value: it hands on the new.
                assert isinstance(operand, int)
                passed.setdefault(stage, {})[name] = operand
                name = f"apply {names[operand]}"
                slots.add(name, "activation", stage)
            outputs[name] = operand
        inputs = {
            names[t] if t not in cut.made_on else f"apply {names[t]}": t
            for t in reads[key]
        }
        if key == last_round.get(stage):
            for name, tensor in passed.get(stage, {}).items():
                inputs[f"apply {names[tensor]}"] = tensor
                outputs[name] = tensor
        programs.append(CutProgram(stage, "apply", operators, inputs, outputs))
    return programs


def _passing(
    graph: OpGraph,
    cut: ApplyCut,
    unchanged: Mapping[str, str],
    last_round: Mapping[int, _Key],
) -> dict[int, _Key]:
    """Where outputs that no operator makes are handed on, by position.

    Those are literals, raw sums, and leaves that become something else: a leaf that
    stays where it is needs no program.
    """
    found = {}
    outputs = zip(graph.output_paths, graph.outputs, strict=True)
    for position, (path, operand) in enumerate(outputs):
        if path not in unchanged and operand not in cut.made_on:
            stage = cut.output_stage[position]
            found[position] = last_round.get(stage, (stage, 0))
    return found


def _unchanged(parts: StepParts, next_paths: Mapping[str, str]) -> dict[str, str]:
    """The leaf that an output of apply is, by path, if that leaf is not updated."""
    graph = parts.apply
    leaves: dict[Operand, str] = {i.tensor: i.path for i in graph.inputs}
    by_path = dict(zip(graph.output_paths, graph.outputs, strict=True))
    found: dict[str, str] = {}
    for path, operand in by_path.items():
        leaf = leaves.get(operand)
        if leaf is None or leaf in parts.sums or leaf in parts.prepared:
            continue
        after = by_path.get(next_paths.get(leaf, ""))
        if after is None or leaves.get(after) == leaf:
            found[path] = leaf
    return found


def _own_sums(
    programs: Sequence[CutProgram], slots: Mapping[str, Slot]
) -> frozenset[str]:
    """Sums over microbatches that no other stage reads, by slot."""
    sums = {n for p in programs for n, state in p.added.items() if state == SUM}
    return frozenset(sums) - {
        name
        for program in programs
        for name in program.inputs
        if name in sums and slots[name].stage != program.stage
    }


def _made_nowhere(graph: OpGraph, cut: StageCut) -> tuple[Operator, ...]:
    """Operators of outputs that no stage makes: of the batch alone, such as counts."""
    operators = graph.blocks[0].operators
    elsewhere = [op for op in operators if cut.made_on.keys().isdisjoint(op.results)]
    wanted = (t for t in tensors_of(graph.outputs) if t not in cut.made_on)
    return leading_to(wanted, elsewhere)


def _reads_of(operators: Iterable[Operator]) -> dict[int, None]:
    """Tensors that operators read and do not make, in order of first reading."""
    made: set[int] = set()
    read: dict[int, None] = {}
    for op in operators:
        read.update(dict.fromkeys(t for t in tensors_of(op.operands) if t not in made))
        made.update(op.results)
    return read


def joint_program(programs: Iterable[CutProgram], graph: OpGraph) -> CutProgram | None:
    """All work of a stage on a microbatch as one program; None if it is one already.

    What the programs hand to each other is inside, and returned too.
    """
    programs = [each for each in programs if each.kind != "apply"]
    if len(programs) < 2:
        return None
    made = {name for each in programs for name in each.outputs}
    chosen = {op.index for each in programs for op in each.operators}
    operators = tuple(op for op in graph.blocks[0].operators if op.index in chosen)
    inputs = {n: t for p in programs for n, t in p.inputs.items() if n not in made}
    outputs = {n: operand for p in programs for n, operand in p.outputs.items()}
    added = {n: state for each in programs for n, state in each.added.items()}
    stage = programs[0].stage
    return CutProgram(stage, "backward", operators, inputs, outputs, added)


def program_graph(program: CutProgram, graph: OpGraph, ties: _Ties) -> OpGraph:
    """The graph of a program of `graph`, whose inputs and outputs are slots in order.

    `ties` are the outputs that inputs become, by position.
    """
    names = tuple(program.taken)
    types = map(graph.type_of, program.taken.values())
    structs = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in types]

    def task(*values: Any) -> list[Any]:
        runner = WholeRunner(graph)
        given = dict(zip(names, values, strict=True))
        return run_program(program, runner, given, lambda _, out: runner.value(out))

    task.__name__ = f"{program.kind}_{program.stage}"
    return graph_of(task, structs, names, list(program.outputs), ties)


def run_program(
    program: CutProgram,
    runner: RetracingRunner,
    given: Mapping[str, Any],
    value_of: Callable[[str, Operand], Any],
) -> list[Any]:
    """The outputs of a program, whose values by slot the runner has then."""
    runner.values.update({tensor: given[n] for n, tensor in program.inputs.items()})
    runner.run_operators(program.operators)
    found: list[Any] = []
    for name, operand in program.outputs.items():
        value = as_array(value_of(name, operand))
        if name in program.added:
            value = JOINS[program.added[name]](given[name], value)
        found.append(value)
    return found
