"""Draws a whole program: its arguments, its lines, and what it returns."""

from __future__ import annotations

import random
from collections.abc import Sequence

import jax

from tests.fuzz import arithmetic, calling, shaping
from tests.fuzz.directed import choose, follow
from tests.fuzz.nesting import grow
from tests.fuzz.programs import Argument, Program
from tests.fuzz.scope import Scope, infer, is_float, is_inexact

assert arithmetic and calling and shaping  # imported so that every operation registers
RULES = "rules"
TOPICS = ("elements", "reductions", "products", "values", "shapes", "indexing")
TOPICS += ("windows", "nesting", "calls", RULES)
_DIVISIBLE = (8, 4, 2, 16)
_OTHER = (8, 1, 3, 6, 5, 0)
_FLOATS = ("float32", "float32", "float32", "bfloat16", "float16", "float64")


def draw_program(
    draw: random.Random, topic: str = "", wanted: frozenset[str] = frozenset()
) -> Program:
    """A program of up to a dozen lines, with more of one topic if one is named.

    The topic `rules` follows recipes, those of the rules `wanted` if there are any.
    """
    x64 = draw.randrange(4) == 3
    with jax.enable_x64(x64):
        if topic == RULES:
            return _follow_recipes(draw, wanted, x64)
        return _draw(draw, {topic: 4}, x64)


def _follow_recipes(draw: random.Random, wanted: frozenset[str], x64: bool) -> Program:
    """Recipes, and a few lines that work on what they made; all of it is returned."""
    scope = Scope(draw, [draw.choice(_DIVISIBLE) for _ in range(3)])
    arguments: list[Argument] = []
    for recipe in choose(draw, 4 + draw.randrange(4), wanted):
        arguments += follow(scope, recipe)
    grow(scope, draw.randrange(4))
    made = [name for line in scope.lines for name in line.results]
    return Program(tuple(arguments), tuple(scope.lines), tuple(made), (), x64)


def _draw(draw: random.Random, weights: dict[str, int], x64: bool) -> Program:
    sizes = [draw.choice(_DIVISIBLE) for _ in range(3)]
    sizes += [draw.choice(_OTHER) for _ in range(draw.randrange(3))]
    wants_gradient = draw.randrange(3) == 2
    scope = Scope(draw, sizes, differentiable=wants_gradient)
    arguments = _arguments(draw, sizes, x64)
    for argument in arguments:
        scope.add_parameter(argument.kind(), argument.name)
    grow(scope, 3 + draw.randrange(8), weights)
    program = Program(arguments, tuple(scope.lines), _results(scope), (), x64)
    if wants_gradient:
        return _with_gradient(program, scope)
    return _without_unread(program)


def _arguments(
    draw: random.Random, sizes: Sequence[int], x64: bool
) -> tuple[Argument, ...]:
    arguments = []
    for index in range(2 + draw.randrange(3)):
        shape = [draw.choice(sizes) for _ in range(draw.choice((2, 3, 1, 4, 0, 5)))]
        while shape and _product(shape) > 2048:
            shape.pop()
        dtype = draw.choice(_FLOATS[: 6 if x64 else 5])
        if draw.randrange(8) == 7:
            dtype = "complex64"
        arguments.append(Argument(f"a{index}", tuple(shape), dtype))
    limit = max(sizes)
    dtype = draw.choice(("int32", "int32", "int8", "uint32"))
    shape = tuple(draw.choice(sizes) for _ in range(draw.choice((1, 2, 1))))
    arguments.append(Argument("i0", shape, dtype, 0, limit))
    if draw.randrange(3) == 2:
        arguments.append(Argument("i1", tuple(sizes[:2]), "int32", -2, limit + 2))
    if draw.randrange(4) == 3:
        arguments.append(Argument("b0", tuple(sizes[:2]), "bool"))
    if draw.randrange(2):
        arguments.append(Argument("k0", draw.choice(((), (), (4,))), "key"))
    return tuple(arguments)


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= max(size, 1)
    return result


def _results(scope: Scope) -> tuple[str, ...]:
    """Values that no line reads, a few others, and sometimes an argument."""
    read = {operand for line in scope.lines for operand in line.operands}
    made = [name for line in scope.lines for name in line.results]
    chosen = [name for name in made if name not in read][:6]
    if made and scope.flag():
        chosen.append(scope.draw.choice(made))
    if scope.flag() or not chosen:
        chosen.insert(0, scope.draw.choice(scope.own))
    return tuple(chosen)


def _with_gradient(program: Program, scope: Scope) -> Program:
    """Differentiated by all float arguments, if JAX can."""
    kinds = {
        argument.name: scope.types[argument.name] for argument in program.arguments
    }
    by = tuple(name for name, kind in kinds.items() if is_float(kind))
    is_loss = any(is_inexact(scope.types[name]) for name in program.results)
    if not (by and is_loss):
        return _without_unread(program)
    gradient = Program(
        program.arguments, program.lines, program.results, by, program.x64
    )
    text = f"{gradient.source()}\nout = jax.tree.leaves(program({', '.join(kinds)}))[0]"
    if infer(text, list(kinds), list(kinds.values()), ["out"]) is None:
        return _without_unread(program)
    return gradient


def _without_unread(program: Program) -> Program:
    read = {operand for line in program.lines for operand in line.operands}
    read |= set(program.results)
    kept = tuple(a for a in program.arguments if a.name in read)
    return Program(
        kept or program.arguments[:1], program.lines, program.results, (), program.x64
    )
