"""Loops of `while` whose condition is one for each example, as `vmap` makes them.

JAX goes on until none holds, and keeps what is carried for the examples that are done.
It says so only as it lowers the loop. Here both become operators of the loop, so that
they are planned like others.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from ..jax_compat import (
    CALLS,
    LOOPS,
    abstract_value,
    with_eqns,
    with_jaxpr,
    with_jaxprs,
)


def with_scalar_conditions(closed: Any) -> Any:
    """The same jaxpr, whose loops end by one condition for all examples.

    What devices do on their own (shard_map, kernels) stays as it is.
    """
    return with_jaxpr(closed, _rewritten)


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
