"""An update inside `lax.cond`, divided by the arrays that it updates together.

A guarded update (skip the step where gradients overflow) is one conditional on all
parameters, which no stage has. Its branches rarely mix them: what belongs together
becomes a conditional of its own, with the same predicate, on the stage that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import networkx

from ..frontend.dead_code import branches_of_outputs
from ..jax_compat import with_eqns, with_jaxpr


def with_divided_branches(closed: Any) -> Any:
    """The same jaxpr, its conditionals divided where branches allow it.

    Work on scalars (a step count, a rate) is done in each that reads it.
    """
    return with_jaxpr(
        closed,
        lambda jaxpr: with_eqns(
            jaxpr, [new for eqn in jaxpr.eqns for new in _divided(eqn)]
        ),
    )


def _divided(eqn: Any) -> Iterator[Any]:
    groups = _groups(eqn) if eqn.primitive.name == "cond" and not eqn.effects else []
    if len(groups) < 2:
        yield eqn
        return
    index, *operands = eqn.invars
    for group in groups:
        is_kept = [output in group for output in range(len(eqn.outvars))]
        branches, reads = branches_of_outputs(eqn.params["branches"], is_kept)
        yield eqn.replace(
            invars=[
                index,
                *(v for v, is_read in zip(operands, reads, strict=True) if is_read),
            ],
            outvars=[eqn.outvars[output] for output in sorted(group)],
            params={**eqn.params, "branches": branches},
        )


def _groups(eqn: Any) -> list[set[int]]:
    """Outputs that some branch makes of the same arrays; a scalar is by itself."""
    together = networkx.utils.UnionFind(range(len(eqn.outvars)))
    for branch in eqn.params["branches"]:
        jaxpr = branch.jaxpr
        place = {id(v): f"operand {i}" for i, v in enumerate(jaxpr.invars)}
        for inner in jaxpr.eqns:
            _unite(
                together,
                [place.get(id(v), id(v)) for v in _arrays(inner.invars, inner.outvars)],
            )
        for output, v in enumerate(jaxpr.outvars):
            _unite(together, [output, *(place.get(id(v), id(v)) for v in _arrays([v]))])
    groups: dict[Any, set[int]] = {}
    for output in range(len(eqn.outvars)):
        groups.setdefault(together[output], set()).add(output)
    return list(groups.values())


def _unite(together: Any, members: Sequence[object]) -> None:
    if members:
        together.union(*members)


def _arrays(*variables: Sequence[Any]) -> list[Any]:
    """Those that are neither literals nor scalars."""
    return [
        v for vs in variables for v in vs if not hasattr(v, "val") and v.aval.size > 1
    ]
