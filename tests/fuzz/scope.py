"""What a generator of lines works on: the values made so far, with their types."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.functions import NAMESPACE
from tests.fuzz.programs import Line, function_text

MAX_ELEMENTS = 4096
MAX_RANK = 5
Test = Callable[[Any], bool]


class Unfit(Exception):
    """No value made so far fits the operation that was drawn."""


def is_float(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.floating)


def is_inexact(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.inexact)


def is_integer(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.integer)


def is_bool(kind: Any) -> bool:
    return kind.dtype == np.bool_


def is_complex(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jnp.complexfloating)


def is_key(kind: Any) -> bool:
    return jnp.issubdtype(kind.dtype, jax.dtypes.prng_key)


def is_number(kind: Any) -> bool:
    return not is_key(kind)


class Scope:
    """The lines of one function while it grows.

    A nested scope sees the values of the one around it unless it `is_closed`; in a
    `differentiable` one nothing may stand in the way of reverse mode.
    """

    def __init__(
        self,
        draw: random.Random,
        sizes: Sequence[int],
        *,
        outer: Scope | None = None,
        is_closed: bool = False,
        differentiable: bool = False,
    ) -> None:
        self.draw, self.sizes = draw, tuple(sizes)
        self.differentiable = differentiable
        self.depth = 0 if outer is None else outer.depth + 1
        self.types: dict[str, Any] = {}
        if outer is not None and not is_closed:
            self.types |= outer.types
        self._names: list[int] = [0] if outer is None else outer._names
        self.own: list[str] = []
        self.lines: list[Line] = []
        self.used: list[str] = []
        self.preamble: list[str] = []

    def fresh(self, letter: str) -> str:
        self._names[0] += 1
        return f"{letter}{self._names[0]}"

    def add_parameter(self, kind: Any, name: str | None = None) -> str:
        name = name or self.fresh("p")
        self.types[name] = kind
        self.own.append(name)
        return name

    def value(
        self, *tests: Test, rank: int | None = None, least: int = 0, size: bool = False
    ) -> str:
        """A value that passes all tests, later ones more often.

        `rank` is exact, `least` its lower bound; `size` asks for at least one element.
        """
        fitting = [
            name
            for name, kind in self.types.items()
            if (len(kind.shape) == rank if rank is not None else True)
            and len(kind.shape) >= least
            and (not size or kind.size)
            and all(test(kind) for test in tests)
        ]
        if not fitting:
            raise Unfit
        recent = fitting[-4:] if self.draw.randrange(2) else fitting
        name = self.draw.choice(recent[::-1])
        self.use(name)
        return name

    def use(self, name: str) -> str:
        """Mark a value as read by the line that is being made."""
        self.used.append(name)
        return name

    def like(self, name: str, *tests: Test) -> str:
        """A value that broadcasts with `name` to at most its shape, or to more."""
        shape = self.types[name].shape

        def broadcasts(kind: Any) -> bool:
            try:
                np.broadcast_shapes(shape, kind.shape)
            except ValueError:
                return False
            return True

        return self.value(broadcasts, *tests)

    def same(self, name: str, *tests: Test) -> str:
        """A value of the same shape."""
        shape = self.types[name].shape
        return self.value(lambda kind: kind.shape == shape, *tests)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape

    def dim(self, name: str, *, size: bool = False) -> int:
        """A dim of a value, of at least one element if `size`."""
        dims = [d for d, n in enumerate(self.shape(name)) if n or not size]
        if not dims:
            raise Unfit
        return self.draw.choice(dims)

    def dims(self, name: str) -> tuple[int, ...]:
        """Some dims of a value, in order, possibly none."""
        return tuple(d for d in range(len(self.shape(name))) if self.draw.randrange(2))

    def flag(self) -> bool:
        return bool(self.draw.randrange(2))

    def one_of(self, *items: Any) -> Any:
        return self.draw.choice(items)

    def size(self) -> int:
        return self.draw.choice(self.sizes)

    def nested(self, kinds: Sequence[Any], **options: Any) -> Scope:
        """The scope of a nested function with parameters of these types."""
        inner = Scope(self.draw, self.sizes, outer=self, **options)
        inner.differentiable |= self.differentiable
        for kind in kinds:
            inner.add_parameter(kind)
        return inner

    def define(
        self, inner: Scope, parameters: Sequence[str], result: str, prefix: str = ""
    ) -> str:
        """Put a nested function before the line that is being made; its name."""
        name = self.fresh("f")
        text = function_text(name, parameters, inner.lines, result)
        self.preamble.append(prefix + text)
        made = {*parameters, *(r for line in inner.lines for r in line.results)}
        reads = [operand for line in inner.lines for operand in line.operands]
        self.used.extend(n for n in (*reads, *inner.used) if n not in made)
        return name

    def coerced(self, inner: Scope, wanted: Any, fallback: str) -> str:
        """Text of a value of type `wanted` from what `inner` made, to be returned.

        `fallback` is a value of that type, which takes in others of another shape.
        """
        own = [name for name in inner.own if is_number(inner.types[name])]
        same = [n for n in own if inner.types[n].shape == wanted.shape]
        if is_key(wanted) or not own:
            return fallback
        dtype = jnp.dtype(wanted.dtype).name
        name = self.draw.choice((same or own)[::-1])
        if same and inner.types[name].dtype == wanted.dtype:
            return f"jnp.tanh({name})" if is_inexact(wanted) else name
        if is_bool(wanted):
            return f"jnp.logical_xor({fallback}, jnp.any({name} != 0))"
        if is_inexact(wanted):
            text = name if same else f"jnp.sum({name})"
            text = f"{text}.real" if is_complex(inner.types[name]) else text
            return f"(0.5 * {fallback} + jnp.tanh(0.1 * {text})).astype('{dtype}')"
        other = name if same else f"jnp.max({name}, initial=0)"
        if not is_integer(inner.types[name]) and not is_bool(inner.types[name]):
            return fallback
        return f"({fallback} + {other}).astype('{dtype}') % 7"

    def emit(self, kind: str, text: str, count: int | None) -> bool:
        """Add the line `results = text` if JAX can trace it and it is not too large.

        `count` is the length of the sequence that the text makes, None for an array.
        """
        names = [self.fresh("v") for _ in range(count or 1)]
        operands = tuple(dict.fromkeys(self.used))
        comma = "," if count == 1 else ""
        whole = "\n".join([*self.preamble, f"{', '.join(names)}{comma} = {text}"])
        self.reset()
        types = infer(whole, operands, [self.types[name] for name in operands], names)
        if types is None:
            return False
        for each in types:
            if each.size > MAX_ELEMENTS or len(each.shape) > MAX_RANK:
                return False
        self.lines.append(Line(kind, whole, operands, tuple(names)))
        for name, each in zip(names, types, strict=True):
            self.types[name] = each
            self.own.append(name)
        return True

    def reset(self) -> None:
        """Forget the line that was being made."""
        self.used, self.preamble = [], []


def infer(
    text: str, operands: Sequence[str], kinds: Sequence[Any], results: Sequence[str]
) -> list[Any] | None:
    """Types of the results of one line, or None if JAX refuses it."""
    code = compile(text, "<fuzz>", "exec")

    def run(*values: Any) -> list[Any]:
        scope = {**NAMESPACE, **dict(zip(operands, values, strict=True))}
        exec(code, scope)
        return [jnp.asarray(scope[name]) for name in results]

    try:
        return list(jax.eval_shape(run, *kinds))
    except Exception:  # whatever JAX refuses is no program
        return None
