"""Follows the values of a program to where they are made, and to their uses.

So it tells how often a loop runs where the program does not say: it has a counter, a
carried integer with a constant start and step that the condition compares with a
constant; `jax.lax.scan` and `fori_loop` make such. And which all-reduces stand for
other collectives: a small gather may be written as the sum of its pieces, each in
zeros, and a small reduce-scatter as a sum of which each device reads its slice. XLA's
compiler for TPUs does all three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, prod
from typing import TypeAlias

# Operations that hand their first operand on.
_TRANSPARENT = frozenset(
    "copy bitcast convert reshape copy-start copy-done opt-barrier".split()
)
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r" ([a-z][\w\-]*)\(([^()]*)\)(.*)$")
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)\s*(?:,|$)")  # an operand's, behind its type


@dataclass(frozen=True)
class _Operation:
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str  # between its parentheses
    attributes: str


@dataclass(frozen=True)
class _Value:
    """A value of a computation; `scope` are the operands of the call around it."""

    computation: str
    name: str
    scope: tuple[_Value, ...] | None = None


_Body: TypeAlias = tuple[Mapping[str, _Operation], str]  # by name; that of the root


@dataclass(frozen=True)
class ValueReader:
    """The values of one program, whose computations are given as lines."""

    computations: Mapping[str, Sequence[str]]
    _bodies: dict[str, _Body] = field(default_factory=dict)

    def is_of_pieces(self, computation: str, name: str, index: int) -> bool:
        """Whether operand `index` of an operation is a device's own piece in zeros."""
        operands = self._operands(_Value(computation, name))
        return index < len(operands) and self._is_padded(operands[index])

    def slice_read(self, computation: str, name: str, index: int | None) -> str | None:
        """The shape of the slices that alone read a value, or element `index` of it.

        Each device reads its own; None if anything else is read.
        """
        shapes = self._slices(_Value(computation, name), index)
        return shapes.pop() if len(shapes) == 1 else None

    def _is_padded(self, value: _Value) -> bool:
        made = self._operation(value := self._origin(value))
        if made is None or made.opcode != "dynamic-update-slice":
            return False
        base = self._operation(filled := self._origin(self._operands(value)[0]))
        if base is not None and base.opcode == "broadcast":
            filled = self._origin(self._operands(filled)[0])
            base = self._operation(filled)
        is_zero = base is not None and base.opcode == "constant" and _is_zero(base.text)
        return is_zero and any(map(self._is_own, self._operands(value)[2:]))

    def _slices(self, value: _Value, index: int | None) -> set[str | None]:
        """The shapes of the slices that read a value; None for whatever else does."""
        found: set[str | None] = set()
        name, body = value.name, self._body(value.computation)
        for user, made in body[0].items():
            if name not in made.operands:
                continue
            there = replace(value, name=user)
            places = [at for at, each in enumerate(made.operands) if each == name]
            if index is not None:
                if made.opcode != "get-tuple-element":
                    found.add(None)
                elif _index(made) == index:
                    found |= self._slices(there, None)
            elif made.opcode in _TRANSPARENT:
                found |= self._slices(there, None)
            elif made.opcode == "dynamic-slice":
                is_own = any(map(self._is_own, self._operands(there)[1:]))
                found.add(made.shape if places == [0] and is_own else None)
            elif made.opcode == "fusion" and (called := _called(made)):
                for parameter, inner in self._body(called)[0].items():
                    if inner.opcode == "parameter" and int(inner.text) in places:
                        here = _Value(called, parameter, self._operands(there))
                        found |= self._slices(here, None)
            else:
                found.add(None)
        is_root = index is None and name == body[1]
        return found | {None} if is_root else found

    def _is_own(self, place: _Value) -> bool:
        """Whether a place is another one on each device, or may be."""
        made = self._operation(place := self._origin(place))
        if made is None or made.opcode in ("partition-id", "replica-id"):
            return made is not None
        if made.opcode == "get-tuple-element":
            carried = self._carried(place)
            loop = self._loops.get(place.computation)
            first = (
                None if carried is None or not loop else self._element(loop, carried)
            )
            return first is not None and self._is_own(first)
        if not made.shape.startswith(("s", "u")):
            return False
        return any(map(self._is_own, self._operands(place)))

    @cached_property
    def _loops(self) -> Mapping[str, _Value]:
        """What each body of a loop starts with."""
        found: dict[str, _Value] = {}
        for around, lines in self.computations.items():
            for line in lines:
                loop = re.search(r" while\(%?([\w.\-]+)\).* body=%?([\w.\-]+)", line)
                if loop:
                    found[loop.group(2)] = _Value(around, loop.group(1))
        return found

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
        found = re.search(r"direction=(\w+)", made.attributes)
        direction = found.group(1) if found else ""
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
        found = re.fullmatch(r"-?\d+", made.text)
        return int(made.text) if found else None

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
            elif made.opcode in ("fusion", "call") and (called := _called(made)):
                value = self._root(called, self._operands(value))
            elif made.opcode == "parameter" and value.scope is not None:
                value = value.scope[int(made.text)]
            elif made.opcode == "get-tuple-element":
                whole = self._operands(value)[0]
                element = self._element(whole, _index(made))
                if element is None:
                    return value
                value = element
            elif (whole := self._copied_in_slices(value)) is not None:
                value = whole
            else:
                break
        return value

    def _copied_in_slices(self, value: _Value) -> _Value | None:
        """What a value is a copy of whose slices are copied side by side."""
        made = self._operation(value)
        if made is None or "ConcatBitcast" not in made.attributes:
            return None
        wholes: set[_Value] = set()
        slices: set[str] = set()
        for done in self._operands(value):
            (start,) = self._operands(done)[:1] or (done,)
            copied = self._operation(start)
            if copied is None or copied.opcode != "slice-start":
                return None
            wholes.add(self._operands(start)[0])
            slices.add(copied.attributes.partition("slice={")[2].partition("}")[0])
        length = sum(map(_length, slices))
        whole = wholes.pop()
        source = self._operation(whole)
        is_whole = source is not None and source.shape == made.shape
        dims = re.findall(r"\d+", made.shape.partition("[")[2])
        is_all = length == prod(map(int, dims))
        return whole if is_whole and is_all and not wholes else None

    def _operands(self, value: _Value) -> tuple[_Value, ...]:
        made = self._operation(value)
        names = made.operands if made else ()
        return tuple(_Value(value.computation, name, value.scope) for name in names)

    def _root(
        self, computation: str, scope: tuple[_Value, ...] | None = None
    ) -> _Value:
        return _Value(computation, self._body(computation)[1], scope)

    def _operation(self, value: _Value) -> _Operation | None:
        return self._body(value.computation)[0].get(value.name)

    def _body(self, computation: str) -> _Body:
        if computation not in self._bodies:
            made: dict[str, _Operation] = {}
            root = ""
            for line in self.computations.get(computation, ()):
                found = _LINE.match(line)
                operation = found and _OPERATION.search(found.group(3))
                if found and operation:
                    opcode, text, attributes = operation.groups()
                    operands = tuple(_NAME.findall(text))
                    name = found.group(2)
                    shape = found.group(3).partition("{")[0]
                    made[name] = _Operation(shape, opcode, operands, text, attributes)
                    root = name if found.group(1) else root
            self._bodies[computation] = made, root
        return self._bodies[computation]


def _length(slices: str) -> int:
    """How many elements a slice such as `[1024:2048], [0:1024]` has."""
    return prod(int(e) - int(s) for s, e in re.findall(r"(\d+):(\d+)", slices))


def _is_zero(text: str) -> bool:
    return text in ("0", "-0", "false")


def _called(operation: _Operation) -> str:
    found = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", operation.attributes)
    return found.group(1) if found else ""


def _index(operation: _Operation) -> int:
    found = re.search(r"index=(\d+)", operation.attributes)
    return int(found.group(1)) if found else 0


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
