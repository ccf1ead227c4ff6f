"""Plans of operators, tensors and arguments that are made when they are looked at.

A deep step has many operators and few ways to run them; names, lines and specs are put
together for who prints, saves or lowers the plan, and seldom for who searches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from autopar.solver.made_when_read import MadeWhenRead

from ..graph.op_graph import MemoryKind, Operator, OpGraph
from ..graph.ports import ports_of
from ..sharding.collective import Collective
from ..sharding.spec import Spec
from .plan import Conversion, InputPlan, OperatorPlan, TensorPlan, total_bytes

Item = TypeVar("Item")


class Work(NamedTuple):
    """How operators run: what `OperatorPlan` says beside names."""

    factors: tuple[str, ...]
    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
    flops: float
    split: int
    seconds: float


class _MadeOnce(MadeWhenRead[Item]):
    """Equal to a tuple of the same items, and pickled as one."""

    @cached_property
    def _all(self) -> tuple[Item, ...]:
        return tuple(self._items())

    def _items(self) -> Iterator[Item]:
        return map(self.item, range(len(self)))

    def __iter__(self) -> Iterator[Item]:
        return iter(self._all)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._all,)


@dataclass(frozen=True, eq=False, repr=False)
class OperatorPlans(_MadeOnce[OperatorPlan]):
    """By operator: row k runs as `works[work_of[k]]` says."""

    operators: Sequence[Operator]
    works: Sequence[Work]
    work_of: np.ndarray

    def __len__(self) -> int:
        return len(self.operators)

    def item(self, index: int) -> OperatorPlan:
        """The plan of the operator in a row."""
        return self._running(self.operators[index], self.work_of[index])

    def _items(self) -> Iterator[OperatorPlan]:
        return map(self._running, self.operators, self.work_of.tolist())

    def _running(self, op: Operator, number: int) -> OperatorPlan:
        return OperatorPlan(op.name, op.kind, op.source, *self.works[number])

    @property
    def seconds(self) -> float:
        """Of all of them."""
        own = np.array([work.seconds for work in self.works])
        return sum(own[self.work_of].tolist())


@dataclass(frozen=True, eq=False, repr=False)
class TensorPlans(_MadeOnce[TensorPlan]):
    """By tensor: `made` are places in `specs`; few tensors have `copies`."""

    graph: OpGraph
    specs: Sequence[Spec]
    made: np.ndarray
    copies: Mapping[int, tuple[Conversion, ...]]

    def __len__(self) -> int:
        return len(self.made)

    def item(self, index: int) -> TensorPlan:
        """The plan of one tensor."""
        tensor = self.graph.tensors[index]
        kind, spec = tensor.type, self.specs[self.made[index]]
        copies = self.copies.get(index, ())
        dtype = _dtype_name(kind.dtype)
        return TensorPlan(tensor.name, kind.shape, dtype, tensor.block, spec, copies)


@dataclass(frozen=True, eq=False, repr=False)
class InputPlans(_MadeOnce[InputPlan]):
    """By argument: `made` are places in `specs`, `bytes` are what one device has."""

    graph: OpGraph
    specs: Sequence[Spec]
    made: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.made)

    def item(self, index: int) -> InputPlan:
        """Where one argument lies."""
        own, spec = self.graph.inputs[index], self.specs[self.made[index]]
        shape, held = self.graph.tensors[own.tensor].type.shape, int(self.bytes[index])
        return InputPlan(own.path, own.role, spec, shape, held, own.memory)


@dataclass(frozen=True, eq=False, repr=False)
class Collectives(_MadeOnce[Collective]):
    """Those of copies, and then `others`.

    Number i is `kinds[kind_of[i]]` for the tensor `tensor_of[i]`.
    """

    graph: OpGraph
    kinds: Sequence[Collective]
    kind_of: np.ndarray
    tensor_of: np.ndarray
    others: Sequence[Collective] = ()

    def __len__(self) -> int:
        return len(self.kind_of) + len(self.others)

    def item(self, index: int) -> Collective:
        """The collective at an index, with its tensor's name and source line.

        An argument that is an operand of a body has one name.
        """
        count = len(self.kind_of)
        if index >= count:
            return self.others[index - count]
        number = int(self.tensor_of[index])
        tensor = self.graph.tensors[number]
        block, row = self.graph.blocks[tensor.block], int(self._maker[number])
        source = self.graph.columns.operators[row].source if row >= 0 else ""
        where = block.trip_count, block.conditional, block.unbounded
        kind = self.kinds[self.kind_of[index]]
        name = self.graph.tensors[self._given.get(number, number)].name
        return kind.at(f"{name} {source}".strip(), *where)

    @cached_property
    def _given(self) -> dict[int, int]:
        """By operand of a body that is one of the step's arguments, which."""
        found = {each.tensor: each.tensor for each in self.graph.inputs}
        columns = self.graph.columns
        has_bodies = columns.where(lambda op: bool(op.bodies))
        for row in np.flatnonzero(has_bodies).tolist():
            op = columns.operators[row]
            inside = {t for body in op.bodies for t in self.graph.blocks[body].inputs}
            for port in ports_of(self.graph, op):
                sources = [tensor for tensor, _, _ in port.reads]
                if len(sources) == 1 and sources[0] in found:
                    given = found[sources[0]]
                    found.update({t: given for t, _ in port.writes if t in inside})
        return found

    @cached_property
    def _maker(self) -> np.ndarray:
        """[tensors] the row that makes each, -1 for none."""
        columns = self.graph.columns
        maker = np.full(len(self.graph.tensors), -1)
        maker[columns.results] = columns.rows_of_results
        return maker

    @property
    def total_bytes(self) -> int:
        """Per-device result bytes of a step."""
        sizes = np.array([each.bytes for each in self.kinds], np.int64)
        trips = np.array([block.trip_count for block in self.graph.blocks], np.int64)
        times = trips[self.graph.columns.block_of_tensors[self.tensor_of]]
        return int((sizes[self.kind_of] * times).sum()) + total_bytes(self.others)


def bytes_in(plans: Sequence[InputPlan], memory: MemoryKind) -> int:
    """What the device, or the host for it, has of all arguments whose home it is."""
    if isinstance(plans, InputPlans):
        own = [k for k, i in enumerate(plans.graph.inputs) if i.memory == memory]
        return int(plans.bytes[own].sum())
    return sum(each.bytes for each in plans if each.memory == memory)


def copies_of(plans: Sequence[TensorPlan]) -> Mapping[int, tuple[Conversion, ...]]:
    """By tensor, its copies; tensors without any need not be there."""
    if isinstance(plans, TensorPlans):
        return plans.copies
    return {k: each.conversions for k, each in enumerate(plans) if each.conversions}


def made_specs(plans: Sequence[TensorPlan]) -> list[Spec]:
    """By tensor, the spec in which it is made."""
    if isinstance(plans, TensorPlans):
        return [plans.specs[number] for number in plans.made.tolist()]
    return [each.spec for each in plans]


def operand_specs(plans: Sequence[OperatorPlan]) -> list[tuple[Spec, ...]]:
    """By operator, the specs in which it reads."""
    if isinstance(plans, OperatorPlans):
        works = [work.operand_specs for work in plans.works]
        return [works[number] for number in plans.work_of.tolist()]
    return [each.operand_specs for each in plans]


def factors_of(
    plans: Sequence[OperatorPlan],
) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """The distinct factors of operators, and by row their place among them."""
    if isinstance(plans, OperatorPlans):
        return [work.factors for work in plans.works], plans.work_of
    places: dict[tuple[str, ...], int] = {}
    number = [places.setdefault(each.factors, len(places)) for each in plans]
    return list(places), np.array(number, np.intp)


def works_of(
    plans: Sequence[OperatorPlan], rows: np.ndarray
) -> Sequence[OperatorPlan | Work]:
    """How the operators of some rows run, without their names where these are apart."""
    if isinstance(plans, OperatorPlans):
        return [plans.works[number] for number in plans.work_of[rows].tolist()]
    return [plans[row] for row in rows.tolist()]


@lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    """As `dtype.name`, which numpy spells out anew each time."""
    return dtype.name
