"""Writes recipes into a scope: each line has arguments of its own, of one shape."""

from __future__ import annotations

import random
from math import prod

from tests.fuzz.programs import Argument
from tests.fuzz.recipes import RECIPES, Recipe
from tests.fuzz.scope import Scope

MAX_SIZE = 1024
_SIZES = (4, 8, 2, 4, 16)
_DTYPES = {"x": "float32", "y": "float32", "z": "float32", "c": "complex64"}
_DTYPES |= {"i": "int32", "j": "int32", "u": "uint32", "p": "bool", "q": "bool"}


def choose(
    draw: random.Random, count: int, wanted: frozenset[str] = frozenset()
) -> list[Recipe]:
    """Recipes of the wanted primitives, or of any if none of these has one."""
    fitting = [each for each in RECIPES if each.kind in wanted] or list(RECIPES)
    kinds = sorted({each.kind for each in fitting})
    chosen = draw.sample(kinds, min(count, len(kinds)))
    return [draw.choice([r for r in fitting if r.kind == kind]) for kind in chosen]


def follow(scope: Scope, recipe: Recipe) -> list[Argument]:
    """Write the recipe's line; the arguments it needs are parameters of the scope."""
    shape = _shape(scope.draw, recipe)
    dim = scope.draw.randrange(len(shape)) if shape else 0
    rank = len(shape)
    names = {
        "s": shape,
        "r": rank,
        "d": dim,
        "n": shape[dim] if shape else 1,
        "v": tuple(d for d in range(rank) if d != dim),
        "w": tuple(1 if d == dim else n for d, n in enumerate(shape)),
        "o": tuple(2 if d == dim else 1 for d in range(rank)),
    }
    arguments = []
    scope.reset()
    for letter in [*_DTYPES, "k"]:
        if f"{{{letter}}}" not in recipe.text:
            continue
        if letter == "k":
            argument = Argument(scope.fresh("k"), (), "key")
        else:
            name, dtype = scope.fresh(letter), _DTYPES[letter]
            argument = Argument(name, shape, dtype, 0, 8)
        arguments.append(argument)
        scope.add_parameter(argument.kind(), argument.name)
        names[letter] = scope.use(argument.name)
    scope.emit(recipe.kind, recipe.text.format(**names), None)
    return arguments


def _shape(draw: random.Random, recipe: Recipe) -> tuple[int, ...]:
    """Of many dims more often, as each is a way to split."""
    ranks = range(recipe.least, recipe.most + 1)
    rank = max(draw.choice(ranks), draw.choice(ranks)) - len(recipe.tail)
    shape = [draw.choice(_SIZES) for _ in range(rank)] + list(recipe.tail)
    while prod(shape) > MAX_SIZE:
        largest = max(range(rank), key=shape.__getitem__)
        shape[largest] //= 2
    return tuple(shape)
