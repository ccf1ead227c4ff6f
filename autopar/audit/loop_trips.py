"""How often a loop runs where the program does not say: its counter is followed.

That is a carried integer with a constant start and step that the condition compares
with a constant; `jax.lax.scan` and `fori_loop` make such. Programs as lowered say of no
loop how often it runs, and those of XLA's compiler for TPUs of few.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import TypeAlias

from autopar.audit.hlo_text import Instruction

# Operations that hand their first operand on.
_TRANSPARENT = frozenset(
    "copy bitcast convert reshape copy-start copy-done opt-barrier".split()
)
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


@dataclass(frozen=True)
class _Value:
    """A value of a computation; `scope` are the operands of the call around it."""

    computation: str
    name: str
    scope: tuple[_Value, ...] | None = None


_Body: TypeAlias = tuple[Mapping[str, Instruction], str]  # by name; that of the root


@dataclass(frozen=True)
class TripReader:
    """Follows the counters of a program, whose computations are given as lines."""

    computations: Mapping[str, Sequence[str]]
    _bodies: dict[str, _Body] = field(default_factory=dict)

    def trip_count(
        self, around: str, operand: str, condition: str, body: str
    ) -> int | None:
        """How often a loop runs; None where that is not known.

        Args:
          around: the computation that the loop is in.
          operand: the name of what it starts with, a tuple.
          condition: the computation that tests it.
          body: the computation that it runs.
        """
        test = self._origin(self._root(condition))
        made = self._operation(test)
        if made is None or made.opcode != "compare":
            return None
        direction = made.called_as("direction")
        counter, limit = self._operands(test)
        index = self._carried(counter)
        if index is None:
            counter, limit = limit, counter
            direction = _MIRRORED.get(direction, direction)
            index = self._carried(counter)
        if index is None:
            return None
        first, last = _Value(around, operand), self._root(body)
        start = self._constant(self._element(first, index))
        step = self._step(self._element(last, index), index)
        stop = self._constant(limit)
        kept = self._carried(limit)
        if kept is not None and self._carried(self._element(last, kept)) == kept:
            stop = self._constant(self._element(first, kept))
        if start is None or step is None or stop is None:
            return None
        return num_trips(start, stop, step, direction)

    def _step(self, value: _Value | None, index: int) -> int | None:
        added = value and self._origin(value)
        made = added and self._operation(added)
        if not added or not made or made.opcode not in ("add", "subtract"):
            return None
        left, right = self._operands(added)
        if self._carried(left) != index and made.opcode == "add":
            left, right = right, left
        step = self._constant(right)
        if self._carried(left) != index or step is None:
            return None
        return step if made.opcode == "add" else -step

    def _constant(self, value: _Value | None) -> int | None:
        made = value and self._operation(self._origin(value))
        if not made or made.opcode != "constant":
            return None
        found = re.fullmatch(r"-?\d+", made.inside)
        return int(made.inside) if found else None

    def _carried(self, value: _Value | None) -> int | None:
        """Which element of a loop's state a value is, in its condition or body."""
        made = value and self._operation(value := self._origin(value))
        if not value or not made or made.opcode != "get-tuple-element":
            return None
        source = self._operation(self._origin(self._operands(value)[0]))
        return _index(made) if source and source.opcode == "parameter" else None

    def _element(self, value: _Value, index: int) -> _Value | None:
        made = self._operation(value := self._origin(value))
        if made is None or made.opcode != "tuple" or index >= len(made.operands):
            return None
        return self._operands(value)[index]

    def _origin(self, value: _Value) -> _Value:
        """Follows a value to where it is made: into fusions, and out of them."""
        while made := self._operation(value):
            if made.opcode in _TRANSPARENT:
                value = self._operands(value)[0]
            elif made.opcode in ("fusion", "call") and made.called:
                value = self._root(made.called[0], self._operands(value))
            elif made.opcode == "parameter" and value.scope is not None:
                value = value.scope[int(made.inside)]
            elif made.opcode == "get-tuple-element":
                whole = self._operands(value)[0]
                element = self._element(whole, _index(made))
                if element is None:
                    return value
                value = element
            else:
                break
        return value

    def _operands(self, value: _Value) -> tuple[_Value, ...]:
        made = self._operation(value)
        names = made.operands if made else ()
        return tuple(_Value(value.computation, name, value.scope) for name in names)

    def _root(
        self, computation: str, scope: tuple[_Value, ...] | None = None
    ) -> _Value:
        return _Value(computation, self._body(computation)[1], scope)

    def _operation(self, value: _Value) -> Instruction | None:
        return self._body(value.computation)[0].get(value.name)

    def _body(self, computation: str) -> _Body:
        if computation not in self._bodies:
            lines = self.computations.get(computation, ())
            made = {each.name: each for each in map(Instruction.parse, lines) if each}
            root = next((each.name for each in made.values() if each.is_root), "")
            self._bodies[computation] = made, root
        return self._bodies[computation]


def _index(made: Instruction) -> int:
    return int(made.called_as("index") or 0)


def num_trips(start: int, stop: int, step: int, direction: str) -> int | None:
    """How often a counter passes its test; None if that is not counting to a limit."""
    if direction == "NE":
        is_hit = (
            step != 0 and (stop - start) % step == 0 and (stop - start) // step >= 0
        )
        return (stop - start) // step if is_hit else None
    is_upwards = direction in ("LT", "LE")
    if direction not in _MIRRORED or step == 0 or is_upwards != (step > 0):
        return None
    if direction in ("LE", "GE"):
        stop += 1 if is_upwards else -1
    return max(0, ceil((stop - start) / step))
