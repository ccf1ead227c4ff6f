"""A plan with the order in which it sends: parameters ahead, gradients behind.

Without it a program says only what each product needs; with it, when it must be there.
At a product stands a barrier, through which go one of its operands and

  the parameter of the next product, gathered  so it is gathered before this product
  the parameter of the one after, as it lies   so it is not gathered much before
  gradients of the product before the last     so they are reduced behind the last one

A compiler that sends beside computation has one product for each transfer, and holds
the parameters of three products at most (FSDP's prefetch: Zhao et al. 2023,
2304.11277, sections 3.3 and 4.3). No value, no collective and no bytes sent change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..costs.memory import peak_bytes
from ..graph.build_graph import BARRIER, SCAN, STRUCTURED
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph, Tensor
from ..graph.work import is_heavy_operator
from ..plans.plan import Conversion, OperatorPlan, ShardingPlan, TensorPlan
from ..plans.slices_ahead import AHEAD, NEXT
from ..sharding.spec import Spec, is_coarser, is_pending
from .overlap import is_gradient, is_parameter


def send_ahead(
    graph: OpGraph, plan: ShardingPlan, budget_bytes: int = 0
) -> ShardingPlan:
    """The plan with its barriers; as it is, where they would not fit the budget.

    `graph` is the one that the plan is of, `budget_bytes` 0 for no budget.
    """
    if _is_ahead(plan) or not _is_of(plan, graph):
        return plan
    changed, found = _ordered(graph, plan)
    if changed is graph:
        return plan
    predicted = plan.predicted
    peak = round(peak_bytes(changed, found) * predicted.memory_correction)
    if budget_bytes and peak > budget_bytes:
        return plan
    return replace(found, predicted=replace(predicted, peak_bytes=peak))


def graph_sent_ahead(graph: OpGraph, plan: ShardingPlan) -> OpGraph:
    """The graph with the barriers that a plan has; `graph` has none yet.

    A graph that the plan is not of is returned as it is.
    """
    if not _is_ahead(plan) or not _is_of(plan, graph):
        return graph
    return _ordered(graph, plan)[0]


def _is_of(plan: ShardingPlan, graph: OpGraph) -> bool:
    planned = {op.name: op for op in plan.operators}
    return (
        len(planned) == len(plan.operators)
        and len(plan.outputs) == len(graph.blocks)
        and [each.name for each in plan.tensors[: len(graph.tensors)]]
        == [each.name for each in graph.tensors]
        and all(
            op.name in planned
            and len(planned[op.name].operand_specs) == len(op.operands)
            for op in graph.operators()
        )
    )


def _is_ahead(plan: ShardingPlan) -> bool:
    return any(op.name.startswith(AHEAD) for op in plan.operators)


def _ordered(graph: OpGraph, plan: ShardingPlan) -> tuple[OpGraph, ShardingPlan]:
    """The graph and the plan with barriers, from a plan that may have them already."""
    builder = _Builder(graph, plan)
    blocks = tuple(map(builder.block, graph.blocks))
    if len(builder.tensors) == len(graph.tensors):
        return graph, plan
    changed = replace(graph, tensors=tuple(builder.tensors), blocks=blocks)
    changed.verify()
    operators = tuple(builder.planned[op.index] for op in changed.operators())
    tensors = tuple(builder.tensor_plans)
    return changed, replace(plan, operators=operators, tensors=tensors)


def _may_be_ahead(loop: Operator) -> bool:
    """Whether its last iteration may stand behind it: what is stacked has numbers."""
    return (
        loop.params["length"] > 1
        and loop.params["unroll"] == 1
        and not any(kind.is_extended for kind in loop.result_types)
    )


@dataclass
class _Barrier:
    """What goes through the barrier at a product, besides one of its operands.

    `is_next`: slices of the loop's next iteration, too (`slices_ahead.py`).
    """

    shards: list[int] = field(default_factory=list[int])
    gathered: list[tuple[int, Spec]] = field(default_factory=list[tuple[int, Spec]])
    reduced: list[tuple[int, Spec]] = field(default_factory=list[tuple[int, Spec]])

    is_next: bool = False

    def tensors(self) -> list[int]:
        """All that goes through it, whether as it lies or copied."""
        return [
            *self.shards,
            *[tensor for tensor, _ in (*self.gathered, *self.reduced)],
        ]


class _Builder:
    def __init__(self, graph: OpGraph, plan: ShardingPlan) -> None:
        self.plan = plan
        by_name = {op.name: op for op in plan.operators}
        self.planned = {op.index: by_name[op.name] for op in graph.operators()}
        self.tensors = list(graph.tensors)
        self.tensor_plans = list(plan.tensors[: len(graph.tensors)])
        self.is_parameter, self.is_gradient = is_parameter(graph), is_gradient(graph)
        self.next_index = 1 + max((op.index for op in graph.operators()), default=0)
        self.now: dict[tuple[int, Spec], int] = {}  # what a copy is read as
        self.loops = {
            op.bodies[0]: op
            for op in graph.operators()
            if op.kind == SCAN and _may_be_ahead(op)
        }

    def block(self, block: Block) -> Block:
        """A block with a barrier at each product that something is sent behind."""
        barriers = self.barriers(block)
        if not barriers:
            return block
        self.now = {}
        waiting: dict[int, int] = {}  # parameters as they lie, behind a barrier
        maker = {t: row for row, op in enumerate(block.operators) for t in op.results}
        operators: list[Operator] = []
        left = set(range(len(block.operators)))
        for row, op in enumerate(block.operators):
            each, position = barriers.get(row), None
            if each is not None:
                for early in self._needed(each.tensors(), block, maker, left):
                    operators.append(self._renamed(block.operators[early]))
                    left.remove(early)
                position = self._position(op)
                assert position is not None
                operators.append(self.barrier(op, position, each, waiting))
            if row in left:
                passed = operators[-1].results[0] if each is not None else None
                operators.append(self._renamed(op, position, passed))
                left.remove(row)
        specs = self.plan.outputs[block.index]
        outputs = self._read(block.outputs, specs)
        return replace(block, operators=tuple(operators), outputs=outputs)

    def barriers(self, block: Block) -> dict[int, _Barrier]:
        """What goes through a barrier at a product, by its row."""
        products = [
            row
            for row, op in enumerate(block.operators)
            if op.kind not in STRUCTURED
            and is_heavy_operator(op)
            and self._position(op) is not None
        ]
        reads, made = self._reads(block), self._made(block, products)
        found: dict[int, _Barrier] = {}
        for tensor, by_spec in reads.items():
            made_in = self.tensor_plans[tensor].spec
            others = [spec for spec in by_spec if spec != made_in]
            if len(others) != 1:
                continue
            copy, rows = (tensor, others[0]), by_spec[others[0]]
            at = made.get(tensor, -1)
            if self.is_parameter[tensor]:
                before = [row for row in products if at < row < rows[0]]
                is_used = not set(rows).isdisjoint(products)
                if before and is_used and self._grows(*copy):
                    found.setdefault(before[-1], _Barrier()).gathered.append(copy)
                    if before[:-1]:
                        found.setdefault(before[-2], _Barrier()).shards.append(tensor)
            elif self.is_gradient[tensor] and is_pending(made_in):
                after = [row for row in products if at < row <= rows[0]]
                if after:
                    row = after[min(1, len(after) - 1)]
                    found.setdefault(row, _Barrier()).reduced.append(copy)
        if len(products) > 1 and self._has_slices(block, reads, products):
            found.setdefault(products[-1], _Barrier()).is_next = True
        return found

    def _has_slices(
        self,
        block: Block,
        reads: Mapping[int, Mapping[Spec, list[int]]],
        products: Sequence[int],
    ) -> bool:
        """Whether a loop reads gathered slices in the first two products of its body.

        All slices that are gathered in one way are; what later products read has gone
        through a barrier, as it lies.
        """
        loop = self.loops.get(block.index)
        if loop is None:
            return False
        first = loop.params["num_consts"] + loop.params["num_carry"]
        for tensor in block.inputs[first:]:
            made_in = self.tensor_plans[tensor].spec
            others = [s for s in reads.get(tensor, {}) if s != made_in]
            if len(others) == 1 and self._grows(tensor, others[0]):
                rows = reads[tensor][others[0]]
                if rows[0] <= products[1] and not set(rows).isdisjoint(products):
                    return True
        return False

    def _made(self, block: Block, products: Collection[int]) -> dict[int, int]:
        """By tensor, the last row that has to run before it can be made.

        That of a product, of a loop, or of what reads a copy of a parameter; all else
        can be made as soon as what it reads is there.
        """
        found: dict[int, int] = {}
        for row, op in enumerate(block.operators):
            specs = self.planned[op.index].operand_specs
            read = [o for o in op.operands if isinstance(o, int)]
            stays = row in products or bool(op.bodies)
            stays |= any(
                self.is_parameter[o] and spec != self.tensor_plans[o].spec
                for o, spec in zip(op.operands, specs, strict=True)
                if isinstance(o, int)
            )
            last = max((found.get(o, -1) for o in read), default=-1)
            found |= dict.fromkeys(op.results, row if stays else last)
        return found

    def _needed(
        self,
        tensors: Iterable[int],
        block: Block,
        maker: Mapping[int, int],
        left: Collection[int],
    ) -> list[int]:
        """The rows that are left to run before `tensors` are there."""
        found: set[int] = set()
        waiting = list(tensors)
        while waiting:
            row = maker.get(waiting.pop(), -1)
            if row in left and row not in found:
                found.add(row)
                read = block.operators[row].operands
                waiting += [o for o in read if isinstance(o, int)]
        return sorted(found)

    def _read(
        self, operands: Sequence[Operand], specs: Sequence[Spec]
    ) -> tuple[Operand, ...]:
        """The operands, behind the barriers that their copies went through."""
        return tuple(
            self.now.get((o, spec), o) if isinstance(o, int) else o
            for o, spec in zip(operands, specs, strict=True)
        )

    def _renamed(
        self, op: Operator, position: int | None = None, passed: int | None = None
    ) -> Operator:
        """The operator with what it reads now; `passed` is its operand `position`."""
        operands = list(self._read(op.operands, self.planned[op.index].operand_specs))
        if position is not None and passed is not None:
            operands[position] = passed
        return replace(op, operands=tuple(operands))

    def _reads(self, block: Block) -> Mapping[int, Mapping[Spec, list[int]]]:
        """By tensor and spec, the rows that read it; outputs come behind all rows."""
        found: dict[int, dict[Spec, list[int]]] = {}
        for row, op in enumerate(block.operators):
            specs = self.planned[op.index].operand_specs
            for o, spec in zip(op.operands, specs, strict=True):
                if isinstance(o, int):
                    found.setdefault(o, {}).setdefault(spec, []).append(row)
        last = len(block.operators)
        for o, spec in zip(block.outputs, self.plan.outputs[block.index], strict=True):
            if isinstance(o, int):
                found.setdefault(o, {}).setdefault(spec, []).append(last)
        return found

    def _grows(self, tensor: int, spec: Spec) -> bool:
        made_in = self.tensor_plans[tensor].spec
        return is_coarser(spec, made_in, self.plan.mesh.axis_sizes)

    def _position(self, op: Operator) -> int | None:
        """The operand that a product waits for: the first that is no parameter."""
        for position, operand in enumerate(op.operands):
            if isinstance(operand, Constant) or operand >= len(self.is_parameter):
                continue
            if not self.is_parameter[operand]:
                return position
        return None

    def barrier(
        self, product: Operator, position: int, each: _Barrier, waiting: dict[int, int]
    ) -> Operator:
        """The barrier at a product; what goes through is read behind it from now on."""
        awaited = product.operands[position]
        assert isinstance(awaited, int)
        spec = self.planned[product.index].operand_specs[position]
        through = [(self.now.get((awaited, spec), awaited), spec)]
        through += [(t, self.tensor_plans[t].spec) for t in each.shards]
        through += [(waiting.pop(t, t), spec) for t, spec in each.gathered]
        through += each.reduced
        results = tuple(self._passed(*pair) for pair in through)
        behind = iter(results[1:])
        for tensor in each.shards:
            waiting[tensor] = next(behind)
            copies = self.tensor_plans[tensor].conversions
            self._set_conversions(waiting[tensor], copies)
            self._set_conversions(tensor, ())
        for copy in (*each.gathered, *each.reduced):
            self.now[copy] = next(behind)
        index, self.next_index = self.next_index, self.next_index + 1
        types = tuple(self.tensors[t].type for t in results)
        operands, specs = tuple(t for t, _ in through), tuple(s for _, s in through)
        name = f"{NEXT if each.is_next else AHEAD}{product.name}"
        self.planned[index] = OperatorPlan(
            name, BARRIER, product.source, (), specs, specs, 0.0, 1, 0.0
        )
        return Operator(
            index=index,
            name=name,
            kind=BARRIER,
            params={},
            operands=operands,
            results=results,
            operand_types=types,
            result_types=types,
            block=product.block,
            eqn=product.eqn,
            source=product.source,
        )

    def _passed(self, tensor: int, spec: Spec) -> int:
        source, result = self.tensors[tensor], len(self.tensors)
        name = f"{AHEAD}{source.name}"
        self.tensors.append(Tensor(result, name, source.type, source.block))
        plan = self.tensor_plans[tensor]
        self.tensor_plans.append(
            TensorPlan(name, plan.shape, plan.dtype, plan.block, spec)
        )
        return result

    def _set_conversions(
        self, tensor: int, conversions: tuple[Conversion, ...]
    ) -> None:
        plan = self.tensor_plans[tensor]
        self.tensor_plans[tensor] = replace(plan, conversions=conversions)
