"""Of which arguments results are made, element by element or moved about.

The next value of state is made so: `p - rate * update` of `p`, a running average of
what it was, a cache of one slice less. A gradient is not: it comes out of products and
sums. Where several arguments are alike, the nearest is the one a result replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from ..jax_compat import Literal, callee, with_scan_counts

_ELEMENTWISE = frozenset(
    "abs add add_any and atan2 autopar_pin cbrt ceil clamp convert_element_type copy"
    " copy_p cos cosh device_put div erf erf_inv exp exp2 expm1 floor imag"
    " integer_pow is_finite layout_constraint log log1p logistic max min mul name neg"
    " nextafter not or pow pvary real reduce_precision rem reshard round rsqrt"
    " select_n sharding_constraint shift_left shift_right_arithmetic"
    " shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh"
    " xor".split()
)
_MOVING = frozenset(
    "all_gather all_gather_invariant all_to_all bitcast_convert_type concatenate"
    " dynamic_slice expand_dims ffi_call gather io_callback pad pallas_call ppermute"
    " psum psum_invariant pure_callback reduce_scatter reshape rev slice split squeeze"
    " stack transpose".split()
)
# Into their first operand, or for it.
_WRITING = ("autopar_relayout_like", "dynamic_update_slice", "scatter")


class MadeOf(NamedTuple):
    """By input of its own shape, the number of elementwise operators to a result.

    Bit i of `moved` is set if input i comes to it, by what moves elements, too.
    """

    distances: Mapping[int, int]
    moved: int


_NOTHING = MadeOf({}, 0)


def derived_results(jaxpr: Any) -> list[MadeOf]:
    """By result of a jaxpr, the inputs that it is made of; 0 operators returns one.

    What a loop carries is made of what it began with.
    """
    return _results(jaxpr, [MadeOf({i: 0}, 1 << i) for i in range(len(jaxpr.invars))])


def _results(jaxpr: Any, inputs: Sequence[MadeOf]) -> list[MadeOf]:
    found: dict[Any, MadeOf] = {
        var: each for var, each in zip(jaxpr.invars, inputs, strict=True) if each.moved
    }

    def of(atom: Any) -> MadeOf:
        return _NOTHING if isinstance(atom, Literal) else found.get(atom, _NOTHING)

    for eqn in jaxpr.eqns:
        operands = [of(atom) for atom in eqn.invars]
        if not any(each.moved for each in operands):
            continue
        for var, each in zip(eqn.outvars, _made(eqn, operands), strict=True):
            if each.moved:
                found[var] = each
    return [of(atom) for atom in jaxpr.outvars]


def _made(eqn: Any, operands: Sequence[MadeOf]) -> Sequence[MadeOf]:
    name, params = eqn.primitive.name, eqn.params
    if name == "optimization_barrier":
        return operands
    if name == "cond":
        branches = [_results(b.jaxpr, operands[1:]) for b in params["branches"]]
        return [_nearest(each) for each in zip(*branches, strict=True)]
    if name == "while":
        return operands[params["cond_nconsts"] + params["body_nconsts"] :]
    body = params["jaxpr"] if name in ("scan", "shard_map") else callee(eqn)
    if body is not None:
        made = _results(getattr(body, "jaxpr", body), operands)
        if name == "scan":
            counts = with_scan_counts(params)
            first, count = counts["num_consts"], counts["num_carry"]
            for i, begun in enumerate(operands[first : first + count]):
                made[i] = _nearest((made[i], begun))
        return made
    return [_of_one(eqn, operands, var.aval) for var in eqn.outvars]


def _of_one(eqn: Any, operands: Sequence[MadeOf], aval: Any) -> MadeOf:
    name, shape = eqn.primitive.name, getattr(aval, "shape", None)
    is_whole = name == "broadcast_in_dim" and eqn.invars[0].aval.size == aval.size
    if name in _MOVING or is_whole:
        return MadeOf({}, reduce(or_, (each.moved for each in operands)))
    if name.startswith(_WRITING):
        return _nearest(operands[:1], 1)
    if name not in _ELEMENTWISE:
        return _NOTHING
    alike = zip(eqn.invars, operands, strict=True)
    return _nearest([each for atom, each in alike if atom.aval.shape == shape], 1)


def _nearest(several: Sequence[MadeOf], more: int = 0) -> MadeOf:
    found, moved = dict[int, int](), 0
    for each in several:
        moved |= each.moved
        for place, distance in each.distances.items():
            found[place] = min(found.get(place, distance + more), distance + more)
    return MadeOf(found, moved)
