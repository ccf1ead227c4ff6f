"""Draws the mesh that a program runs on, and how its plan is made."""

from __future__ import annotations

import random
from math import prod

from autopar.sharding.mesh import MeshShape
from tests.fuzz.plans import Case
from tests.fuzz.programs import Program

_MESHES = [(2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2), (3,), (6,), (1, 4)]
_MESHES += [(2, 3), (2, 1, 2), (5,)]
_MANNERS = ("uniform", "uniform", "uniform", "costs", "costs", "solver")


def draw_case(draw: random.Random, program: Program) -> Case:
    sizes = program.mesh or draw.choice(_MESHES)
    assert prod(sizes) <= 8
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
    return Case(mesh, draw.choice(_MANNERS), draw.randrange(1 << 16))
