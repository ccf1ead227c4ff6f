"""From which arguments results are made element by element, and in how many operators.

The next value of state is made so: `p - rate * update` of `p`, a running average of
what it was, a cache of one slice less. A gradient is not: it comes out of products.
Where several arguments are alike, the nearest is the one that a result replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..jax_compat import CALLS, Literal

Distances: TypeAlias = Mapping[int, int]

_ELEMENTWISE = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos"
    " cosh device_put div erf erf_inv exp exp2 expm1 floor imag integer_pow is_finite"
    " log log1p logistic max min mul name neg nextafter not or pow pvary real"
    " reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic"
    " shift_right_logical sharding_constraint sign sin sinh sqrt square stop_gradient"
    " sub tan tanh xor".split()
)
_WRITING = ("dynamic_update_slice", "scatter")  # into their first operand
_NOTHING: Distances = {}


def derived_results(jaxpr: Any) -> list[Distances]:
    """By result of a jaxpr: the inputs of its shape that it is made of, elementwise.

    Each with the number of operators on the way, 0 for an input that is returned. What
    a loop carries is made of what it began with.
    """
    inputs: list[Distances] = [{i: 0} for i in range(len(jaxpr.invars))]
    return _results(jaxpr, inputs)


def _results(jaxpr: Any, inputs: Sequence[Distances]) -> list[Distances]:
    found: dict[Any, Distances] = {
        var: each for var, each in zip(jaxpr.invars, inputs, strict=True) if each
    }

    def of(atom: Any) -> Distances:
        return _NOTHING if isinstance(atom, Literal) else found.get(atom, _NOTHING)

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        if not any(operands):
            continue
        for var, each in zip(eqn.outvars, _made(eqn, operands), strict=True):
            if each:
                found[var] = each
    return [of(atom) for atom in jaxpr.outvars]


def _made(eqn: Any, operands: Sequence[Distances]) -> Sequence[Distances]:
    name, params = eqn.primitive.name, eqn.params
    if name == "optimization_barrier":
        return operands
    if name == "cond":
        branches = [_results(b.jaxpr, operands[1:]) for b in params["branches"]]
        return [_nearest(each, 0) for each in zip(*branches, strict=True)]
    if name == "while":
        return operands[params["cond_nconsts"] + params["body_nconsts"] :]
    if name == "scan" or params.get(CALLS.get(name, "")) is not None:
        body = params[CALLS.get(name, "jaxpr")]
        made = _results(getattr(body, "jaxpr", body), operands)
        if name == "scan":
            first, count = params["num_consts"], params["num_carry"]
            for i, begun in enumerate(operands[first : first + count]):
                made[i] = _nearest((made[i], begun), 0)
        return made
    shape = getattr(eqn.outvars[0].aval, "shape", None)
    if name in _ELEMENTWISE:
        alike = zip(eqn.invars, operands, strict=True)
        own = [each for atom, each in alike if atom.aval.shape == shape]
    else:
        own = operands[:1] if name.startswith(_WRITING) else []
    return [_nearest(own, 1), *[_NOTHING] * (len(eqn.outvars) - 1)]


def _nearest(several: Sequence[Distances], more: int) -> Distances:
    found: dict[int, int] = {}
    for each in several:
        for place, distance in each.items():
            found[place] = min(found.get(place, distance + more), distance + more)
    return found
