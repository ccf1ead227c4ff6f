"""Bytes one device holds while the plan runs: arguments, results and temporaries.

Kernels after fusion (`kernels.py`) in the compiler's order (`execution_order.py`); of a
loop the body is counted once and what it stacks in full. State is donated: its next
value is returned in its memory. Calibrated on CPUs: see `benchmarks/memory_error.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..graph.build_graph import COND, SCAN, SHARD_MAP, WHILE
from ..graph.op_graph import Operator, OpGraph
from ..plans.plan import ShardingPlan
from ..plans.plan_columns import bytes_in, factors_of
from ..plans.slices_ahead import bytes_ahead
from ..rules.collective_matmul import ring_bytes
from ..rules.halos import copied_bytes, factors_with_halos, rows_with_halos
from ..sharding.spec import num_shards
from .depthwise import depthwise_bytes, depthwise_rows
from .execution_order import Liveness, run_in_order
from .fusion import Traits
from .kernel_builder import kernel_block
from .kernels import Border, Value
from .narrow_floats import rounding_traits
from .packing import packed_heights, packed_peak
from .plan_arrays import PlanArrays
from .random_words import drawing_bytes, drawing_rows

POINTER_BYTES = 8  # of each result, in the table that a program returns


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """What a plan is predicted to hold on one device.

    `argument_bytes` and `output_bytes` (of results that take no argument's memory) are
    held throughout; `liveness` is by block: what comes and goes. `live_bytes` is the
    most that is live at once, which rows of memory can tell; the compiler needs
    `peak_bytes` for it (`packing.py`).
    """

    graph: OpGraph
    plan: ShardingPlan
    argument_bytes: int
    output_bytes: int
    liveness: Mapping[int, Liveness]

    @cached_property
    def temp_bytes(self) -> int:
        """The memory that temporaries need."""
        return self._packed(0)

    @property
    def peak_bytes(self) -> int:
        """All of it, as `MemoryUse.device_bytes` of the compiled program."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes

    @property
    def live_bytes(self) -> int:
        """The most bytes that are live at once, of arguments, results and all."""
        return self.argument_bytes + self.output_bytes + self.liveness[0].peak_bytes

    def temporaries(self) -> tuple[Value, ...]:
        """What takes memory of its own at the peak, besides arguments and results."""
        return tuple(self._live(0, int(self.liveness[0].bytes.argmax())))

    @cached_property
    def holes(self) -> np.ndarray:
        """[positions of the outermost block] bytes in use that nothing live takes."""
        liveness = self.liveness[0]
        return packed_heights(liveness, self._needed_inside(0)) - liveness.bytes

    def _packed(self, block: int) -> int:
        """The memory that a block needs, its operands and results apart."""
        return packed_peak(self.liveness[block], self._needed_inside(block))

    def _needed_inside(self, block: int) -> np.ndarray:
        """[positions] the memory that the bodies of each kernel need."""
        liveness = self.liveness[block]
        kernels = liveness.block.columns
        inner = kernels.inner_bytes.copy()
        columns = self.graph.columns
        rows = np.flatnonzero(columns.where(lambda op: bool(op.bodies))).tolist()
        bodies = {columns.index[row]: columns.operators[row].bodies for row in rows}
        for k in np.flatnonzero(inner).tolist():
            own = bodies.get(kernels.operator[k], ())
            if own and all(body in self.liveness for body in own):
                live = max(self.liveness[body].peak_bytes for body in own)
                inner[k] += max(map(self._packed, own)) - live
        return inner[list(liveness.order)]

    def _live(self, block: int, position: int) -> Iterator[Value]:
        liveness = self.liveness[block]
        if not liveness.order:
            return
        for value in liveness.live(position):
            if value not in liveness.borrowed:
                yield liveness.block.values[value]
        kernel = liveness.block.kernels[liveness.order[position]]
        if kernel.inner_bytes and kernel.operator is not None:
            bodies = next(
                op.bodies
                for op in self.graph.blocks[block].operators
                if op.index == kernel.operator
            )
            if not bodies:
                return
            fullest = max(bodies, key=lambda body: self.liveness[body].peak_bytes)
            yield from self._live(fullest, int(self.liveness[fullest].bytes.argmax()))

    def __str__(self) -> str:
        return (
            f"{self.peak_bytes:,} B a device = {self.argument_bytes:,} arguments "
            f"+ {self.output_bytes:,} results + {self.temp_bytes:,} temporaries"
        )


def peak_bytes(graph: OpGraph, plan: ShardingPlan) -> int:
    """The most bytes that one device is predicted to hold; see `MemoryProfile`."""
    return memory_profile(graph, plan).peak_bytes


def memory_profile(graph: OpGraph, plan: ShardingPlan) -> MemoryProfile:
    """The memory of a plan on one device."""
    return profile_of_arrays(PlanArrays.of(graph, plan))


def profile_of_arrays(arrays: PlanArrays) -> MemoryProfile:
    """The memory of a plan whose specs were numbered before."""
    graph, plan = arrays.graph, arrays.plan
    at_host = [each.memory == "host" for each in graph.inputs]
    tied = {p: i.output for p, i in enumerate(graph.inputs) if i.output is not None}
    fetched = frozenset(
        position for position, is_there in enumerate(at_host) if is_there
    )
    sent = frozenset(output for position, output in tied.items() if at_host[position])
    donated = tuple((p, output) for p, output in tied.items() if not at_host[p])
    run = _Run(arrays)
    run.block(0, Border(donated, fetched=fetched, sent=sent))
    returned = set(tied.values())
    output_bytes = POINTER_BYTES * len(graph.outputs)
    for position, operand in enumerate(graph.outputs):
        if isinstance(operand, int) and position not in returned:
            spec = plan.outputs[0][position]
            whole = graph.tensors[operand].type.bytes
            output_bytes += whole // num_shards(spec, plan.mesh.axis_sizes)
    argument_bytes = bytes_in(plan.inputs, "device")
    return MemoryProfile(graph, plan, argument_bytes, output_bytes, run.liveness)


class _Run:
    """Goes through blocks, inner ones first."""

    def __init__(self, arrays: PlanArrays) -> None:
        self.graph, self._arrays = arrays.graph, arrays
        self.liveness: dict[int, Liveness] = {}
        self._traits = Traits.of(self.graph.columns)
        if arrays.widens:
            self._traits = rounding_traits(self._traits, self.graph.columns)
        sizes, plans = arrays.plan.mesh.axis_sizes, arrays.plan.operators
        columns = self.graph.columns
        self._held_inside = Counter[int]()  # by operator without bodies
        for row in rows_with_halos(self.graph, *factors_of(plans)):
            op = columns.operators[row]
            halos = factors_with_halos(op, plans[row].factors)
            held = copied_bytes(op, halos, sizes) + ring_bytes(op, halos, sizes)
            self._held_inside[op.index] += held
        for row in drawing_rows(columns).tolist():
            op, spec = columns.operators[row], plans[row].result_specs[0]
            self._held_inside[op.index] += drawing_bytes(op) // num_shards(spec, sizes)
        for row in depthwise_rows(columns).tolist():
            op, spec = columns.operators[row], plans[row].result_specs[0]
            self._held_inside[op.index] += depthwise_bytes(op, spec, sizes)

    def block(self, index: int, border: Border) -> int:
        """The peak of a block, its operands and results apart."""
        block, columns = self.graph.blocks[index], self.graph.columns
        has_bodies = columns.where(lambda op: bool(op.bodies) and op.kind != SHARD_MAP)
        own = np.flatnonzero(has_bodies & (columns.block_of == index)).tolist()
        loops = [columns.operators[row] for row in own]
        inner_bytes = {op.index: max(self.bodies(op)) for op in loops}
        inner_bytes |= self._held_inside
        kernels = kernel_block(self._arrays, self._traits, block, border, inner_bytes)
        self.liveness[index] = run_in_order(kernels)
        return self.liveness[index].peak_bytes

    def bodies(self, op: Operator) -> list[int]:
        blocks = [self.graph.blocks[body] for body in op.bodies]
        borders = [Border()] * len(blocks)
        if op.kind == SCAN:
            consts, carry = op.params["num_consts"], op.params["num_carry"]
            borders = [
                Border(
                    tuple((consts + k, k) for k in range(carry)),
                    frozenset(range(consts + carry, len(blocks[0].inputs))),
                    frozenset(range(carry, len(blocks[0].outputs))),
                )
            ]
        elif op.kind == WHILE:
            consts, carry = op.params["body_nconsts"], len(blocks[1].outputs)
            replaced = tuple((consts + k, k) for k in range(carry))
            borders = [Border(), Border(replaced)]
        else:
            assert op.kind == COND, f"{op.kind} has bodies"
        ahead = bytes_ahead(self.graph, self._arrays.plan, op) if op.kind == SCAN else 0
        return [
            self.block(block.index, border) + ahead
            for block, border in zip(blocks, borders, strict=True)
        ]
