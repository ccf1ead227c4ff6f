"""Programs as data: arguments and lines of Python, which print as a function to run.

A line is text, so that a failing case can be pasted; its operands and results are named
so that a reducer can drop lines, and their types are what JAX itself infers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.functions import MESHES, NAMESPACE

_INDENT = "    "


@dataclass(frozen=True)
class Argument:
    """An argument: floats are normal, integers are in `[low, high)`."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a numpy or ml_dtypes name, or "key"
    low: int = 0
    high: int = 10

    def value(self, seed: int, noise: float = 0.0, draw: int = 0) -> Any:
        """An array of numpy, or typed keys.

        `noise` moves inexact values relatively, in a direction that is drawn anew for
        each number `draw`.
        """
        random = np.random.default_rng(seed)
        if self.dtype == "key":
            keys = jax.random.split(jax.random.key(seed), max(1, self._size))
            return keys[: self._size].reshape(self.shape)
        dtype = np.dtype(getattr(jnp, self.dtype, self.dtype))
        if dtype == np.bool_:
            return random.integers(0, 2, self.shape).astype(bool)
        if jnp.issubdtype(dtype, jnp.integer):
            return random.integers(self.low, self.high, self.shape).astype(dtype)
        values = random.normal(size=self.shape)
        if dtype.kind == "c":
            values = values + 1j * random.normal(size=self.shape)
        moved = np.random.default_rng((seed, draw)).normal(size=self.shape)
        return np.asarray(values * (1 + noise * moved)).astype(dtype)

    def kind(self) -> Any:
        """Its type, as JAX has it."""
        return jax.eval_shape(lambda: jnp.asarray(self.value(0)))

    @property
    def _size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Line:
    """One statement, with the nested functions it calls before it.

    `kind` names what made it; `operands` are the values it reads, `results` those it
    makes.
    """

    kind: str
    text: str
    operands: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A function of arrays. With `gradient`, results are of a scalar's gradient too.

    `lines` are the body, `results` the values returned. `gradient` names the arguments
    that a mean of all inexact results is differentiated by; their gradients are used
    for one descent step, so that these arguments are state.
    """

    arguments: tuple[Argument, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    gradient: tuple[str, ...] = ()
    x64: bool = False

    def __str__(self) -> str:
        types = ", ".join(map(str, self.arguments))
        return f"# jax_enable_x64={self.x64}; {types}\n{self.source()}"

    @property
    def mesh(self) -> tuple[int, ...]:
        """The only mesh it may run on: that of a shard_map in it; else empty."""
        names = (name for name in MESHES if f"mesh={name}" in self.source())
        return next((MESHES[name] for name in names), ())

    def source(self) -> str:
        """The text of a function named `program`."""
        names = ", ".join(argument.name for argument in self.arguments)
        body = [line.text for line in self.lines]
        if self.gradient:
            body = [
                *_function("loss", self.gradient, [*body, *self._loss()]),
                *self._descend(),
            ]
        else:
            body.append(f"return ({', '.join(self.results)},)")
        return "\n".join(_function("program", [names], body))

    def _loss(self) -> list[str]:
        terms = [f"mean_of({name})" for name in self.results]
        kept = "".join(f"{name}, " for name in self.results)
        return [f"return {' + '.join(terms) or '0.0'}, ({kept})"]

    def _descend(self) -> list[str]:
        """One step for every argument, each returned at its own position."""
        names = ", ".join(self.gradient)
        numbers = ", ".join(map(str, range(len(self.gradient))))
        moved = [
            f"moved({a.name}, slopes[{self.gradient.index(a.name)}])"
            if a.name in self.gradient
            else a.name
            for a in self.arguments
        ]
        kept = "".join(f"{value}, " for value in moved)
        return [
            f"both = jax.value_and_grad(loss, ({numbers},), has_aux=True)",
            f"value, slopes = both({names})",
            f"return ({kept}value)",
        ]

    def function(self) -> Callable[..., Any]:
        """The program as a function that JAX can trace."""
        scope = dict(NAMESPACE)
        exec(compile(self.source(), "<fuzz>", "exec"), scope)
        return scope["program"]

    def values(self, noise: float = 0.0, draw: int = 0) -> list[Any]:
        """The arguments, the same on every call."""
        with jax.enable_x64(self.x64):
            return [a.value(i, noise, draw) for i, a in enumerate(self.arguments)]


def _function(name: str, parameters: Sequence[str], body: Sequence[str]) -> list[str]:
    indented = [textwrap.indent(text, _INDENT) for text in body]
    return [f"def {name}({', '.join(parameters)}):", *indented]


def function_text(
    name: str, parameters: Sequence[str], lines: Sequence[Line], result: str
) -> str:
    """A nested function, as text that can stand before the line that calls it."""
    body = [*(line.text for line in lines), f"return {result}"]
    return "\n".join(_function(name, parameters, body))


def without_line(program: Program, index: int) -> Program | None:
    """The program without a line; results that are no more are left out.

    A line that another reads cannot go: None.
    """
    gone = set(program.lines[index].results)
    rest = program.lines[:index] + program.lines[index + 1 :]
    if any(gone & set(line.operands) for line in rest):
        return None
    results = tuple(name for name in program.results if name not in gone)
    gradient = program.gradient
    return Program(program.arguments, rest, results, gradient, program.x64)
