"""The operator graph of one traced function: tensors, operators, blocks.

A *block* is a straight line of operators; the graph's own block is the function, and a
scan owns a block for its body. Calls were inlined before, so nothing else nests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np

Role = Literal["state", "batch", "constant", "other", "sum"]
MemoryKind = Literal["device", "host"]


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a tensor; `dtype` may be an extended (PRNG key) dtype."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @cached_property
    def bytes(self) -> int:
        return self.size * self.itemsize

    @property
    def is_extended(self) -> bool:
        """Whether the dtype is a PRNG key's: such tensors stay whole."""
        return not isinstance(self.dtype, np.dtype)

    def __str__(self) -> str:
        name = getattr(self.dtype, "name", str(self.dtype))
        return f"{name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Tensor:
    """A value of the graph. `name` is stable between runs: the plan refers to it."""

    index: int
    name: str
    type: TensorType
    block: int

    def __str__(self) -> str:
        return f"%{self.index} {self.name}: {self.type}"


@dataclass(frozen=True, eq=False)
class Constant:
    """A literal operand: a scalar written in the program itself."""

    value: Any
    type: TensorType

    def __str__(self) -> str:
        return str(self.value)


Operand = int | Constant


@dataclass(frozen=True, eq=False)
class Operator:
    """One primitive applied to tensors.

    `operands` are tensor indices or constants, `results` tensor indices. `bodies` are
    the blocks it owns: the body of a scan, condition and body of a while, the branches
    of a cond. `eqn` is JAX's own equation, kept for its params and context.
    """

    index: int
    name: str
    kind: str
    params: Mapping[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    block: int
    eqn: Any
    source: str = ""
    bodies: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """Operators in executed order.

    `trip_count` is how often the block runs a step; a loop of unknown length counts
    once and is `unbounded`, a branch counts as if it is taken and is `conditional`.
    `weight` is the number of executions that costs are multiplied with.
    """

    index: int
    parent: int | None
    trip_count: int
    weight: float
    conditional: bool
    unbounded: bool
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class GraphInput:
    """An argument leaf (or closed-over array) and where its next value is returned.

    What lies in the host's `memory` is brought in when it is read first, and its next
    value sent back. A "sum" may come as parts that add up; if it is handed on, it is
    reduced once in `num_runs` of the function.
    """

    tensor: int
    path: str
    role: Role
    output: int | None = None  # position among the outputs, for state
    memory: MemoryKind = "device"
    num_runs: int = 1


@dataclass(frozen=True)
class OpGraph:
    """The whole function. Block 0 is the outermost; outputs are operands of it."""

    name: str
    tensors: tuple[Tensor, ...]
    blocks: tuple[Block, ...]
    inputs: tuple[GraphInput, ...]
    output_paths: tuple[str, ...]

    @property
    def outputs(self) -> tuple[Operand, ...]:
        return self.blocks[0].outputs

    def operators(self) -> tuple[Operator, ...]:
        """Every operator of every block, bodies after the blocks that hold them."""
        return self.columns.operators

    def type_of(self, operand: Operand) -> TensorType:
        """The type of a tensor or literal."""
        if isinstance(operand, Constant):
            return operand.type
        return self.tensors[operand].type

    @cached_property
    def columns(self) -> GraphColumns:
        """The same as arrays."""
        return GraphColumns.of(self)

    def verify(self) -> None:
        """Raise AssertionError if an operator reads what its block has not made yet.

        Makes the columns, which all that follows needs.
        """
        assert len(self.columns.type_of) == len(self.tensors)
        for block in self.blocks:
            made = set(block.inputs)
            for op in block.operators:
                for operand in op.operands:
                    assert isinstance(operand, Constant) or operand in made, (
                        f"{op.name} reads tensor {operand} before it is made"
                    )
                assert len(op.results) == len(op.result_types), op.name
                for result, kind in zip(op.results, op.result_types, strict=True):
                    assert result not in made, f"{op.name} makes tensor {result} twice"
                    assert self.tensors[result].type == kind, op.name
                    assert self.tensors[result].block == block.index, op.name
                    made.add(result)
            for operand in block.outputs:
                assert isinstance(operand, Constant) or operand in made, (
                    f"block {block.index} returns tensor {operand}, which nothing makes"
                )

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        for block in self.blocks:
            inputs = ", ".join(str(self.tensors[i]) for i in block.inputs)
            lines.append(f"block {block.index} x{block.trip_count} ({inputs})")
            for op in block.operators:
                results = ", ".join(str(self.tensors[i]) for i in op.results)
                operands = ", ".join(
                    str(o) if isinstance(o, Constant) else f"%{o}" for o in op.operands
                )
                bodies = "".join(f" block {body}" for body in op.bodies)
                lines.append(f"  {results} = {op.kind}({operands}){bodies}")
            outputs = ", ".join(
                str(o) if isinstance(o, Constant) else f"%{o}" for o in block.outputs
            )
            lines.append(f"  return {outputs}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class GraphColumns:
    """A graph as arrays, for what is done to all its operators or tensors at once.

    Row k is `operators[k]`. It reads the tensors `operands[operand_start[k] :
    operand_start[k + 1]]`, -1 for a constant, and makes those of `results` likewise.
    Rows of one number `alike` [rows] differ in names and tensors only; `examples` are
    one row of each number. `index` and `block_of` [rows] are the operators'; `type_of`
    [tensors] are places in `types`, `block_of_tensors` [tensors] blocks.
    """

    operators: tuple[Operator, ...]
    operand_start: np.ndarray
    operands: np.ndarray
    result_start: np.ndarray
    results: np.ndarray
    alike: np.ndarray
    examples: np.ndarray
    index: np.ndarray
    block_of: np.ndarray
    types: tuple[TensorType, ...]
    type_of: np.ndarray
    block_of_tensors: np.ndarray

    @classmethod
    def of(cls, graph: OpGraph) -> GraphColumns:
        """The columns of a graph; `graph.columns` keeps them."""
        operators = tuple([op for block in graph.blocks for op in block.operators])
        operands = [
            operand if operand.__class__ is int else -1
            for op in operators
            for operand in op.operands
        ]
        alike = np.array(_alike(operators), np.intp)
        type_of, types = _by_object([tensor.type for tensor in graph.tensors])
        return cls(
            operators,
            _starts([len(op.operands) for op in operators]),
            np.array(operands, np.intp),
            _starts([len(op.results) for op in operators]),
            np.array([result for op in operators for result in op.results], np.intp),
            alike,
            np.unique(alike, return_index=True)[1],
            np.array([op.index for op in operators], np.intp),
            np.array([op.block for op in operators], np.intp),
            types,
            type_of,
            np.array([tensor.block for tensor in graph.tensors], np.intp),
        )

    @cached_property
    def distinct(self) -> list[Operator]:
        """One operator of each number `alike`."""
        return [self.operators[row] for row in self.examples.tolist()]

    def where(self, test: Callable[[Operator], bool]) -> np.ndarray:
        """bool [rows] that pass a test, which reads neither names nor tensors."""
        return np.array([test(op) for op in self.distinct], bool)[self.alike]

    @cached_property
    def rows_of_operands(self) -> np.ndarray:
        """The row that reads each entry of `operands`."""
        return np.repeat(np.arange(len(self.operators)), np.diff(self.operand_start))

    @cached_property
    def rows_of_results(self) -> np.ndarray:
        """The row that makes each entry of `results`."""
        return np.repeat(np.arange(len(self.operators)), np.diff(self.result_start))

    def __str__(self) -> str:
        return (
            f"GraphColumns: {len(self.operators)} operators of {len(self.examples)} "
            f"kinds, {len(self.type_of)} tensors of {len(self.types)} types"
        )


def _alike(operators: Sequence[Operator]) -> list[int]:
    """Equal numbers for operators that differ in nothing but names and tensors."""
    numbers: dict[object, int] = {}
    found: list[int] = []
    for op in operators:
        constants = ()
        if any([operand.__class__ is not int for operand in op.operands]):
            constants = tuple([constant_key(operand) for operand in op.operands])
        types = tuple(map(id, (*op.operand_types, None, *op.result_types)))
        key = op.kind, types, constants, op.bodies
        try:
            whole = *key, *op.params.items()
            found.append(numbers.setdefault(whole, len(numbers)))
        except TypeError:  # a parameter that has no hash
            whole = *key, repr(op.params)
            found.append(numbers.setdefault(whole, len(numbers)))
    return found


def constant_key(operand: Operand) -> object:
    """Equal for equal literals; None for a tensor."""
    if not isinstance(operand, Constant):
        return None
    if operand.type.is_extended:
        return repr(operand.value)
    value = np.asarray(operand.value)
    return value.dtype, value.shape, value.tobytes()


def params_key(params: Mapping[str, object]) -> object:
    """Equal only for equal parameters: themselves, or how they print."""
    items = tuple(sorted(params.items())) if len(params) > 1 else tuple(params.items())
    try:
        hash(items)
    except TypeError:
        return repr(items)
    return items


def _by_object(
    types: Sequence[TensorType],
) -> tuple[np.ndarray, tuple[TensorType, ...]]:
    """The place of each type among the distinct ones, and those."""
    ids = list(map(id, types))
    distinct = dict(zip(ids, types, strict=True))
    places = {key: place for place, key in enumerate(distinct)}
    return np.array([places[key] for key in ids], np.intp), tuple(distinct.values())


def _starts(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(counts, np.intp))])


def is_zero(operand: object) -> bool:
    """Whether an operand is the literal zero: its own part in any pending sum."""
    if not isinstance(operand, Constant) or operand.type.is_extended:
        return False
    return bool(np.all(np.asarray(operand.value) == 0))  # JAX's == would be traced
