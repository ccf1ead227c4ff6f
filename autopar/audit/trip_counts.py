"""Reads how often a loop of a lowered program runs, from its counter.

A counter is a carried integer with a constant start and a constant step, that the
loop's condition compares with a constant; `jax.lax.scan` and `fori_loop` make such.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

# Operations that hand operand i on as result i.
_TRANSPARENT = ("stablehlo.convert", "stablehlo.optimization_barrier")
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}

# MLIR's Python classes live in jaxlib; the objects reached from a public
# `Lowered.compiler_ir` are used as they come, without importing their types.
Operation = Any
Block = Any
Value = Any


@dataclass(frozen=True)
class Scope:
    """Where the arguments of a function come from: its call's operands."""

    operands: tuple[Value, ...]
    outer: "Scope | None"


@dataclass(frozen=True)
class TripCounter:
    """Counts trips in one module, whose functions are given by name."""

    functions: Mapping[str, Operation]

    def trip_count(self, loop: Operation, scope: Scope | None) -> int | None:
        """Returns how often the body of a while loop runs; None if that is not known.

        Args:
          loop: a `stablehlo.while` operation.
          scope: what the arguments of the function around it stand for, if a call.
        """
        condition, body = (region.blocks[0] for region in loop.regions)
        test, inside = self._origin(terminator_of(condition).operands[0], scope)
        if _name(test) != "stablehlo.compare":
            return None
        direction = str(test.owner.attributes["comparison_direction"])
        direction = direction.rstrip(">").split()[-1]
        counter, limit = (
            self._origin(value, inside)[0] for value in test.owner.operands
        )
        if _argument(counter, condition) is None:
            counter, limit = limit, counter
            direction = MIRRORED.get(direction, direction)
        index = _argument(counter, condition)
        if index is None:
            return None
        start = _constant(self._origin(loop.operands[index], scope)[0])
        stop = _constant(limit)
        step = self._step(terminator_of(body).operands[index], body, index, scope)
        if start is None or stop is None or step is None:
            return None
        return num_trips(start, stop, step, direction)

    def _step(
        self, value: Value, body: Block, index: int, scope: Scope | None
    ) -> int | None:
        added, inside = self._origin(value, scope)
        if _name(added) not in ("stablehlo.add", "stablehlo.subtract"):
            return None
        left, right = (self._origin(value, inside)[0] for value in added.owner.operands)
        if _argument(left, body) != index and _name(added) == "stablehlo.add":
            left, right = right, left
        step = _constant(right)
        if _argument(left, body) != index or step is None:
            return None
        return step if _name(added) == "stablehlo.add" else -step

    def _origin(self, value: Value, scope: Scope | None) -> tuple[Value, Scope | None]:
        """Follows a value to where it is made: up into calls and callers."""
        while True:
            name = _name(value)
            if name in _TRANSPARENT:
                value = value.owner.operands[value.result_number]
            elif name is not None and (callee := callee_of(value.owner)):
                scope = Scope(tuple(value.owner.operands), scope)
                value = terminator_of(body_of(self.functions[callee])).operands[
                    value.result_number
                ]
            elif name is None and scope is not None and _is_entry(value.owner):
                value, scope = scope.operands[value.arg_number], scope.outer
            elif name is None and (carried := _unchanged(value)) is not None:
                value = carried
            else:
                return value, scope


def callee_of(op: Operation) -> str | None:
    """The name of the function that an operation calls, if it calls one."""
    name = _CALLS.get(op.name)
    return op.attributes[name].value if name else None


def body_of(function: Operation) -> Block:
    """The one block of a function."""
    return function.operation.regions[0].blocks[0]


def terminator_of(block: Block) -> Operation:
    """The operation whose operands a block returns."""
    return block.operations[len(block.operations) - 1].operation


def _name(value: Value) -> str | None:
    """The operation that makes a value; None for the argument of a block."""
    return None if hasattr(value, "arg_number") else value.owner.name


def _argument(value: Value, block: Block) -> int | None:
    """Which argument of `block` a value is, if it is one."""
    is_argument = hasattr(value, "arg_number") and value.owner == block
    return value.arg_number if is_argument else None


def _is_entry(block: Block) -> bool:
    return block.owner.operation.name == "func.func"


def _unchanged(argument: Value) -> Value | None:
    """What a loop starts this argument with, if no iteration changes it."""
    loop = argument.owner.owner.operation
    if loop.name != "stablehlo.while":
        return None
    body, index = loop.regions[1].blocks[0], argument.arg_number
    is_kept = _argument(terminator_of(body).operands[index], body) == index
    return loop.operands[index] if is_kept else None


def _constant(value: Value) -> int | None:
    if _name(value) != "stablehlo.constant":
        return None
    found = re.match(r"dense<(-?\d+)>", str(value.owner.attributes["value"]))
    return int(found.group(1)) if found else None


def num_trips(start: int, stop: int, step: int, direction: str) -> int | None:
    """How often a counter passes its test; None if that is not counting to a limit."""
    if direction == "NE":
        is_hit = (
            step != 0 and (stop - start) % step == 0 and (stop - start) // step >= 0
        )
        return (stop - start) // step if is_hit else None
    is_upwards = direction in ("LT", "LE")
    if direction not in MIRRORED or step == 0 or is_upwards != (step > 0):
        return None
    if direction in ("LE", "GE"):
        stop += 1 if is_upwards else -1
    return max(0, ceil((stop - start) / step))
