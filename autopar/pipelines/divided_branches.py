"""An update inside a conditional or a loop, divided by the arrays updated together.

A guarded update (skip the step where gradients overflow) is one conditional on all
parameters, and matrices that are orthogonalised together are carried by one loop, which
no stage has. Their bodies rarely mix arrays: what belongs together becomes a
conditional or a loop of its own, on the stage that has it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import networkx

from ..frontend.dead_code import dead_code_eliminated
from ..graph.build_graph import COND, SCAN, WHILE
from ..jax_compat import (
    ClosedJaxpr,
    DropVar,
    with_eqns,
    with_jaxpr,
    with_jaxprs,
    with_scan_counts,
)

DIVIDED = (COND, SCAN, WHILE)


def with_divided_branches(closed: Any) -> Any:
    """The same jaxpr, its conditionals and loops divided where their bodies allow it.

    Work on scalars (a step count, a rate) is done in each that reads it.
    """
    return with_jaxpr(closed, _with_divided)


def _with_divided(jaxpr: Any) -> Any:
    return with_eqns(jaxpr, [new for eqn in jaxpr.eqns for new in _divided(eqn)])


def _divided(eqn: Any) -> Iterator[Any]:
    if eqn.primitive.name not in DIVIDED or eqn.effects:
        yield eqn
        return
    eqn = with_jaxprs(eqn, _with_divided)
    groups = _groups(eqn)
    if len(groups) < 2:
        yield eqn
        return
    for group in groups:
        outvars = [
            v if output in group else DropVar(v.aval)
            for output, v in enumerate(eqn.outvars)
        ]
        yield from _made_alone(eqn.replace(outvars=outvars))


def _made_alone(eqn: Any) -> Sequence[Any]:
    """The equation without what the results that it drops need."""
    read = dict.fromkeys(v for v in eqn.invars if not hasattr(v, "val"))
    made = [v for v in eqn.outvars if not isinstance(v, DropVar)]
    template = next(iter(_bodies(eqn)))[0]
    alone = template.replace(
        constvars=[],
        invars=list(read),
        outvars=made,
        eqns=[eqn],
        debug_info=template.debug_info.with_unknown_names(),
    )
    return dead_code_eliminated(ClosedJaxpr(alone, ())).jaxpr.eqns


def _groups(eqn: Any) -> list[set[int]]:
    """Results that some body makes of the same arrays; a scalar is by itself."""
    together = networkx.utils.UnionFind(range(len(eqn.outvars)))
    for jaxpr, names in _bodies(eqn):
        ids = map(id, jaxpr.invars)
        place: dict[int, Hashable] = dict(zip(ids, names, strict=True))
        literals = {id(v) for v in jaxpr.constvars}
        for inner in jaxpr.eqns:
            _unite(
                together,
                [
                    place.get(id(v), ("value", id(v)))
                    for v in _arrays(inner.invars, inner.outvars)
                    if id(v) not in literals
                ],
            )
        for output, v in enumerate(jaxpr.outvars):
            met = (place.get(id(v), ("value", id(v))) for v in _arrays([v]))
            _unite(together, [output, *met])
    groups: dict[Any, set[int]] = {}
    for output in range(len(eqn.outvars)):
        groups.setdefault(together[output], set()).add(output)
    return list(groups.values())


def _bodies(eqn: Any) -> Iterator[tuple[Any, Sequence[Hashable]]]:
    """Each body that makes the results, and what its inputs are.

    That is the number of a result, which a carry becomes, or an operand's name.
    """
    params = eqn.params
    if eqn.primitive.name == COND:
        for branch in params["branches"]:
            yield branch.jaxpr, _operands(branch.jaxpr)
        return
    if eqn.primitive.name == SCAN:
        counts, body = with_scan_counts(params), params["jaxpr"].jaxpr
        first, number = counts["num_consts"], counts["num_carry"]
    else:
        body, first = params["body_jaxpr"].jaxpr, params["body_nconsts"]
        number = len(eqn.outvars)
    names = _operands(body)
    names[first : first + number] = range(number)
    yield body, names


def _operands(jaxpr: Any) -> list[Hashable]:
    return [("operand", position) for position in range(len(jaxpr.invars))]


def _unite(together: Any, members: Sequence[object]) -> None:
    if members:
        together.union(*members)


def _arrays(*variables: Sequence[Any]) -> list[Any]:
    """Those that are neither literals nor scalars."""
    return [
        v for vs in variables for v in vs if not hasattr(v, "val") and v.aval.size > 1
    ]
