"""Loops of `while` whose condition is one for each example, as `vmap` makes them.

JAX goes on until none holds, and keeps what is carried for the examples that are done.
It says so only as it lowers the loop. Here both become operators of the loop, so that
they are planned like others. A part of the examples may go on until none of its own
holds: its values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from ..graph.op_graph import Operator
from ..jax_compat import (
    CALLS,
    LOOPS,
    abstract_value,
    with_eqns,
    with_jaxpr,
    with_jaxprs,
)
from ..rules.base import Factor
from ..sharding.spec import REPLICATED, State

_ANY_EXAMPLE = "any_example"


def with_scalar_conditions(closed: Any) -> Any:
    """The same jaxpr, whose loops end by one condition for all examples.

    What devices do on their own (shard_map, kernels) stays as it is.
    """
    return with_jaxpr(closed, _rewritten)


def factor_of_microbatch(op: Operator, states: Sequence[State]) -> Factor | None:
    """How a part of the examples says that its loop goes on; None of other operators.

    The result is not whole, but of this part.
    """
    if f"/{_ANY_EXAMPLE}/" not in op.name or states[0] < 0:
        return None
    return Factor(_ANY_EXAMPLE, (states[0],), (REPLICATED,), 0, splits=False)


def _rewritten(jaxpr: Any) -> Any:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind in CALLS or kind in LOOPS:
            eqn = with_jaxprs(eqn, _rewritten)
        if kind == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
            eqn = _with_scalar_condition(eqn)
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)


def _with_scalar_condition(eqn: Any) -> Any:
    params, count = eqn.params, eqn.params["cond_nconsts"]
    condition, body = map(jaxpr_as_fun, (params["cond_jaxpr"], params["body_jaxpr"]))
    consts, rest = eqn.invars[:count], eqn.invars[count:]
    num_body = params["body_nconsts"]

    def goes_on(*operands: Any) -> Any:
        (holds,) = condition(*operands)
        with jax.named_scope(_ANY_EXAMPLE):
            return lax.reduce_or(holds, axes=tuple(range(holds.ndim)))

    def step(*operands: Any) -> list[Any]:
        carried = operands[count + num_body :]
        (holds,) = condition(*operands[:count], *carried)
        following = body(*operands[count : count + num_body], *carried)
        dims = tuple(range(holds.ndim))
        return [
            lax.select_n(lax.broadcast_in_dim(holds, old.shape, dims), old, new)
            for old, new in zip(carried, following, strict=True)
        ]

    def of(function: Any, operands: Any) -> Any:
        kinds = [abstract_value(each.aval) for each in operands]
        return jax.make_jaxpr(function)(*kinds)

    changed = {
        "cond_jaxpr": of(goes_on, [*consts, *rest[num_body:]]),
        "body_jaxpr": of(step, [*consts, *rest]),
        "body_nconsts": count + num_body,
    }
    invars = [*consts, *consts, *rest]
    return eqn.replace(invars=invars, params={**params, **changed})
