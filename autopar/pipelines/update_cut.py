"""Which stage applies which part of the update, and in how many rounds.

Operators that share arrays belong together: the component of a parameter holds its
moments and goes where the parameter lives. Scalars may cross stages: a global norm is
added up from every stage's part, so what reads it runs one round later. Its addends lie
on the stages of their parameters, in no order; added in groups, each stage sends one
number and not hundreds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import networkx

from ..graph.dependencies import read_by, tensors_of
from ..graph.op_graph import Operand, Operator, OpGraph, Tensor
from ..rules.base import is_inexact


@dataclass(frozen=True)
class ApplyCut:
    """Operators by (stage, round), and the stage of every input and output.

    `made_on` is the (stage, round) of the scalars that cross stages. `graph` is the
    apply graph with its sums of scalars added up stage by stage.
    """

    graph: OpGraph
    operators: dict[tuple[int, int], tuple[Operator, ...]]
    home: dict[int, int]
    output_stage: tuple[int, ...]
    made_on: dict[int, tuple[int, int]]


def cut_apply(
    graph: OpGraph,
    home: Mapping[int, int],
    sums: Mapping[int, int],
    everywhere: frozenset[int],
    last: int,
) -> ApplyCut:
    """Place the operators of an apply graph on stages 0 to `last`.

    `home` is the stage of the parameters, `sums` that of the sums over microbatches,
    which are sent once if the parameter lives elsewhere; `everywhere` are inputs that
    every stage may read, as they do not change; so may state that is returned as it
    came in. Other arrays (moments) follow what they meet.
    Parameters that meet (a network, and the average of it that makes its targets) live
    where the gradients of one of them are made.

    Raises:
      NotImplementedError: arrays with gradients of two stages meet in one operator.
    """
    operators = graph.blocks[0].operators
    scalars = {t.index for t in graph.tensors if t.type.size <= 1}
    everywhere |= {
        each.tensor
        for each in graph.inputs
        if each.output is not None and graph.outputs[each.output] == each.tensor
    }
    small = scalars | everywhere | _made_of(operators, everywhere, scalars)
    together = _components(graph, small)
    arrays = {tensor: stage for tensor, stage in home.items() if tensor not in small}
    of_sums = {tensor: stage for tensor, stage in sums.items() if tensor not in small}
    stage_of = _stages_together(graph, small, together, arrays, of_sums)

    def stage_of_operator(op: Operator) -> int | None:
        """The stage of an operator on arrays; None if it only has scalars."""
        arrays = [t for t in (*tensors_of(op.operands), *op.results) if t not in small]
        return stage_of.get(together[("tensor", arrays[0])], 0) if arrays else None

    known = {**home, **sums}
    num_tensors = len(graph.tensors)
    graph, summed_on = sum_by_stage(graph, stage_of_operator)
    small.update(range(num_tensors, len(graph.tensors)))

    def stage_or_sum(op: Operator) -> int | None:
        return summed_on.get(op.index, stage_of_operator(op))

    array_home = {
        t: stage_of.get(together[("tensor", t)], 0)
        for t in graph.blocks[0].inputs
        if t not in small
    }
    return _Rounds(graph, known, small, last, stage_or_sum).cut(array_home)


def _stages_together(
    graph: OpGraph,
    small: Set[int],
    together: networkx.utils.UnionFind,
    home: Mapping[int, int],
    sums: Mapping[int, int],
) -> dict[object, int]:
    """The stage of each component of `together` in which some array has one."""
    met: dict[object, dict[int, int]] = {}  # by component: a tensor of each stage
    for tensor, stage in home.items():
        met.setdefault(together[("tensor", tensor)], {}).setdefault(stage, tensor)
    stages: dict[object, set[int]] = {}
    for tensor, stage in sums.items():
        stages.setdefault(together[("tensor", tensor)], set()).add(stage)
    stage_of: dict[object, int] = {}
    for root, tensors in met.items():
        of_sums = stages.get(root, set())
        if len(tensors) > 1 and len(of_sums) > 1:
            (one, first), (other, second), *_ = tensors.items()
            raise refused_update(graph, small, (first, second), (one, other))
        (stage_of[root],) = tensors if len(tensors) == 1 else of_sums or {min(tensors)}
    return {**{root: min(of_sums) for root, of_sums in stages.items()}, **stage_of}


def _components(graph: OpGraph, small: Set[int]) -> networkx.utils.UnionFind:
    """Arrays and operators that must be together, as all arrays but `small` ones do."""
    together = networkx.utils.UnionFind()
    for tensor in graph.blocks[0].inputs:
        if tensor not in small:
            together[("tensor", tensor)]  # every array is in some component
    for op in graph.blocks[0].operators:
        arrays = [t for t in (*tensors_of(op.operands), *op.results) if t not in small]
        if arrays:
            together.union(("operator", op.index), *(("tensor", t) for t in arrays))
    for each in graph.inputs:  # a leaf's next value is made where the leaf lives
        after = None if each.output is None else graph.outputs[each.output]
        if isinstance(after, int) and not {after, each.tensor} & small:
            together.union(("tensor", each.tensor), ("tensor", after))
    return together


def _made_of(
    operators: Sequence[Operator], everywhere: Set[int], small: Set[int]
) -> set[int]:
    """What is made of the inputs of every stage, and scalars, alone."""
    found = set(everywhere)
    for op in operators:
        reads = tensors_of(op.operands)
        if not found.isdisjoint(reads) and found.union(small).issuperset(reads):
            found.update(op.results)
    return found


class _Rounds:
    """Orders operators into rounds: scalars of one round cross before the next."""

    def __init__(
        self,
        graph: OpGraph,
        home: Mapping[int, int],
        small: set[int],
        last: int,
        stage_of_operator: Callable[[Operator], int | None],
    ) -> None:
        self.graph, self.last = graph, last
        self.operators = graph.blocks[0].operators
        self.leaf_of = {i.output: i.tensor for i in reversed(graph.inputs)}
        self.made_by = {t: op for op in self.operators for t in op.results}
        self.stage = {op.index: stage_of_operator(op) for op in self.operators}
        self.known = home
        self.given = {t: home.get(t, 0) for t in graph.blocks[0].inputs if t in small}
        self.given.update(self.own_numbers())

    def own_numbers(self) -> dict[int, int]:
        """The stages of scalar leaves whose next value is made of one stage's arrays.

        Second moments of a whole parameter, for one.
        """
        found = {}
        for position, leaf in self.leaf_of.items():
            operand = None if position is None else self.graph.outputs[position]
            maker = self.made_by.get(operand) if isinstance(operand, int) else None
            stage = None if maker is None else self.stage[maker.index]
            if leaf in self.given and stage is not None:
                found[leaf] = stage
        return found

    def cut(self, array_home: Mapping[int, int]) -> ApplyCut:
        rounds: dict[int, int] = {}
        for op in self.operators:
            stage = self.stage[op.index]
            if stage is not None:
                rounds[op.index] = self.round_at(op, stage, rounds)
        self.postpone(rounds)
        made_on: dict[int, tuple[int, int]] = {}
        chosen: dict[tuple[int, int], set[int]] = {}

        def put(op: Operator, key: tuple[int, int], results: Sequence[int]) -> None:
            self.include(op, chosen.setdefault(key, set()))
            made_on.update(dict.fromkeys(results, key))

        for op in self.operators:
            stage = self.stage[op.index]
            if stage is not None:
                put(op, (stage, rounds[op.index]), op.results)
        outputs = []
        for position, operand in enumerate(self.graph.outputs):
            stage = self.output_stage(position, operand, array_home)
            outputs.append(stage)
            maker = self.made_by.get(operand) if isinstance(operand, int) else None
            if maker is not None and operand not in made_on:
                assert isinstance(operand, int)
                put(maker, (stage, self.round_at(maker, stage, rounds)), [operand])
        ordered = {
            key: tuple(op for op in self.operators if op.index in found)
            for key, found in sorted(chosen.items())
        }
        given = {**self.given, **self.read_elsewhere(ordered, outputs)}
        home = {**array_home, **given}
        return ApplyCut(self.graph, ordered, home, tuple(outputs), made_on)

    def read_elsewhere(
        self,
        chosen: Mapping[tuple[int, int], Sequence[Operator]],
        output_stage: Sequence[int],
    ) -> dict[int, int]:
        """Inputs that only other stages than theirs read, with the first of those.

        What the microbatches read, and what is replaced, stays.
        """
        readers: dict[int, set[int]] = {t: set() for t in self.given}
        for (stage, _), operators in chosen.items():
            for op in operators:
                for tensor in readers.keys() & set(tensors_of(op.operands)):
                    readers[tensor].add(stage)
        for position, operand in enumerate(self.graph.outputs):
            leaf = self.leaf_of.get(position)
            if isinstance(operand, int) and operand in readers and leaf != operand:
                readers[operand].add(output_stage[position])
            if leaf in readers and leaf != operand:
                readers[leaf].add(self.given[leaf])
        return {
            tensor: min(stages)
            for tensor, stages in readers.items()
            if stages and self.given[tensor] not in stages and tensor not in self.known
        }

    def postpone(self, rounds: dict[int, int]) -> None:
        """What is made of inputs alone is made in the round that first reads it.

        Decayed moments need not wait in memory for the global norm.
        """
        of_inputs: set[int] = set()
        for op in self.operators:
            makers = [self.made_by.get(t) for t in tensors_of(op.operands)]
            if all(maker is None or maker.index in of_inputs for maker in makers):
                of_inputs.add(op.index)
        last_round: dict[int | None, int] = {}
        for index, number in rounds.items():
            stage = self.stage[index]
            last_round[stage] = max(last_round.get(stage, 0), number)
        first_read: dict[int, int] = {}
        for op in reversed(self.operators):
            stage = self.stage[op.index]
            if op.index in of_inputs and stage is not None:
                reads = [first_read[t] for t in op.results if t in first_read]
                wanted = min(reads, default=last_round[stage])
                rounds[op.index] = max(rounds[op.index], wanted)
            for tensor in tensors_of(op.operands):
                maker = self.made_by.get(tensor)
                is_here = maker is not None and self.stage[maker.index] == stage
                number = rounds[op.index] if is_here and stage is not None else 0
                first_read[tensor] = min(first_read.get(tensor, number), number)

    def round_at(self, op: Operator, stage: int, rounds: Mapping[int, int]) -> int:
        """The first round of `stage` in which all scalars that `op` needs are there."""
        number = 0
        for tensor in tensors_of(op.operands):
            maker = self.made_by.get(tensor)
            if maker is None:
                continue
            made = self.stage[maker.index]
            if made is None:
                number = max(number, self.round_at(maker, stage, rounds))
            else:
                number = max(number, rounds[maker.index] + (made != stage))
        return number

    def include(self, op: Operator, found: set[int]) -> None:
        """The operator, and the scalar ones it needs, made again on every stage."""
        found.add(op.index)
        for tensor in tensors_of(op.operands):
            maker = self.made_by.get(tensor)
            if maker is not None and self.stage[maker.index] is None:
                self.include(maker, found)

    def output_stage(
        self, position: int, operand: object, array_home: Mapping[int, int]
    ) -> int:
        if position in self.leaf_of:
            leaf = self.leaf_of[position]
            return array_home.get(leaf, self.given.get(leaf, 0))
        maker = self.made_by.get(operand) if isinstance(operand, int) else None
        if maker is not None:
            stage = self.stage[maker.index]
            return self.last if stage is None else stage
        if isinstance(operand, int):
            return array_home.get(operand, self.given.get(operand, self.last))
        return self.last


def sum_by_stage(
    graph: OpGraph, stage_of_operator: Callable[[Operator], int | None]
) -> tuple[OpGraph, dict[int, int]]:
    """The graph with sums of scalars added stage by stage, and the stage of new sums.

    Those are sums whose addends two stages or more have, and one several.
    `stage_of_operator` gives the stage of what makes the addends, None if every stage
    can. Values are the same up to rounding.
    """
    block = graph.blocks[0]
    made_by = {t: op for op in block.operators for t in op.results}
    num_reads = Counter[Operand](
        [*read_by(block.operators), *tensors_of(block.outputs)]
    )
    of_sums = {t for op in block.operators if _is_sum(op) for t in op.operands}
    tensors, operators = list(graph.tensors), list[Operator]()
    stage_of: dict[int, int] = {}
    first = 1 + max(op.index for op in graph.operators())

    def add(like: Operator, stage: int | None, left: Operand, right: Operand) -> int:
        number = len(tensors) - len(graph.tensors)
        name, index = f"{like.name}+{number}", len(tensors)
        tensors.append(Tensor(index, name, like.result_types[0], like.block))
        made = {"operands": (left, right), "results": (index,)}
        operators.append(replace(like, index=first + number, name=name, **made))
        if stage is not None:
            stage_of[first + number] = stage
        return index

    # Addends and operators of sums that nothing but another sum reads, by result.
    parts: dict[Operand, tuple[list[Operand], list[Operator]]] = {}
    for op in block.operators:
        if not _is_sum(op):
            operators.append(op)
            continue
        found = [parts.pop(each, ([each], [])) for each in op.operands]
        addends = [each for own, _ in found for each in own]
        inner = [each for _, own in found for each in own]
        (result,) = op.results
        if num_reads[result] == 1 and result in of_sums:
            parts[result] = addends, [*inner, op]
            continue
        by_stage: dict[int | None, list[Operand]] = {}
        for each in addends:
            maker = made_by.get(each) if isinstance(each, int) else None
            stage = None if maker is None else stage_of_operator(maker)
            by_stage.setdefault(stage, []).append(each)
        totals = by_stage.pop(None, [])
        if len(by_stage) < 2 or max(map(len, by_stage.values())) < 2:
            operators += [*inner, op]
            continue
        for stage, own in by_stage.items():
            totals.append(functools.reduce(functools.partial(add, op, stage), own))
        *others, last = totals
        total = functools.reduce(functools.partial(add, op, None), others)
        operators.append(replace(op, operands=(total, last)))
    if not stage_of:
        return graph, {}
    blocks = (replace(block, operators=tuple(operators)), *graph.blocks[1:])
    return replace(graph, tensors=tuple(tensors), blocks=blocks), stage_of


def _is_sum(op: Operator) -> bool:
    """Whether an operator adds two scalars."""
    if op.kind not in ("add", "add_any"):
        return False
    (kind,) = op.result_types
    return not kind.shape and is_inexact(kind)


def refused_update(
    graph: OpGraph, small: Iterable[int], ends: tuple[int, int], stages: tuple[int, int]
) -> NotImplementedError:
    """The update joins the arrays `ends` of two `stages`: by what, and where.

    `small` are the tensors that may cross stages.
    """
    apart, links = set(small), networkx.Graph()
    for op in graph.blocks[0].operators:
        for tensor in {*tensors_of(op.operands), *op.results} - apart:
            links.add_edge(("tensor", tensor), ("operator", op.index))
    for each in graph.inputs:
        after = None if each.output is None else graph.outputs[each.output]
        if isinstance(after, int) and not {after, each.tensor} & apart:
            links.add_edge(("tensor", each.tensor), ("tensor", after))
    source, target = (("tensor", tensor) for tensor in ends)
    path = networkx.shortest_path(links, source, target)
    shared = min(
        (graph.tensors[index] for kind, index in path if kind == "tensor"),
        key=lambda tensor: tensor.type.bytes,
    )
    names = [graph.tensors[tensor].name for tensor in ends]
    op = next(
        op
        for op in graph.blocks[0].operators
        if shared.index in (*op.operands, *op.results)
    )
    return NotImplementedError(
        f"Each stage updates its own arrays, and only scalars cross, but {names[0]} of "
        f"stage {stages[0]} and {names[1]} of stage {stages[1]} meet in the update "
        f"through {shared.name}, {shared.type}, which {op.name!r} at "
        f"{op.source or 'an unknown line'} touches. Make what they share a scalar (for "
        f"an ensemble, jax.vmap the gradients alone and have one optimizer for all "
        f"members), or use autopar.ShardParallel()."
    )
