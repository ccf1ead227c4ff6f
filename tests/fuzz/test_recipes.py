"""Every rule has a recipe that leads to it, or a reason why no program does."""

import gc
import random

import jax
import pytest
from jax.extend.core import Primitive

from autopar.rules.base import registered_kinds, rule_name
from tests.fuzz.directed import follow
from tests.fuzz.plans import trace_program
from tests.fuzz.programs import Program
from tests.fuzz.recipes import RECIPES, UNREACHABLE, Recipe
from tests.fuzz.scope import Scope


def test_every_rule_has_a_recipe_or_a_reason() -> None:
    """A rule for a new primitive needs a line in recipes.py."""
    kinds = {recipe.kind for recipe in RECIPES}
    assert not kinds & UNREACHABLE.keys()
    assert kinds | UNREACHABLE.keys() == registered_kinds()


def test_what_is_said_to_be_absent_is() -> None:
    """Or else it can be reached: give it a recipe."""
    gc.unfreeze()  # what was imported before the tests began
    there = {each.name for each in gc.get_objects() if isinstance(each, Primitive)}
    absent = {kind for kind, reason in UNREACHABLE.items() if "absent" in reason}
    assert not absent & there
    assert absent == UNREACHABLE.keys() - there


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
def test_a_recipe_makes_its_primitive(recipe: Recipe) -> None:
    for seed in range(3):
        scope = Scope(random.Random(seed), (4, 8))
        arguments = tuple(follow(scope, recipe))
        assert scope.lines, recipe
        results = scope.lines[-1].results
        program = Program(arguments, tuple(scope.lines), results)
        traced = trace_program(program.function(), program.values())
        kinds = {rule_name(op) for op in traced.graph.operators()}
        assert recipe.kind in kinds, f"{program}\nmakes only {sorted(kinds)}"
        assert not jax.config.values["jax_enable_x64"]
