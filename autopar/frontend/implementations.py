"""Primitives without a rule, as calls of what they are lowered as.

Libraries make primitives for derivatives or batches of their own, and lower them by
tracing a function. Its operators have rules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from ..jax_compat import (
    CALLS,
    LOOPS,
    abstract_value,
    equation_context,
    implementation,
    plain_call,
    user_context,
    with_eqns,
    with_jaxpr,
    with_jaxprs,
)
from ..rules.base import registered_rules


def with_implementations(closed: Any) -> Any:
    """The same jaxpr, in which primitives that are traced to be lowered are calls.

    What devices do on their own (shard_map, kernels) stays as it is.
    """
    return with_jaxpr(closed, _rewritten)


def _rewritten(jaxpr: Any) -> Any:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind in CALLS or kind in LOOPS:
            eqn = with_jaxprs(eqn, _rewritten)
        elif kind not in registered_rules():
            eqn = _implemented(eqn)
        eqns += _apart(eqn) if kind == "device_put" else [eqn]
    return with_eqns(jaxpr, eqns)


def _apart(eqn: Any) -> list[Any]:
    """An equation for each array that is put somewhere: they may lie differently."""
    if len(eqn.invars) == 1:
        return [eqn]
    params = [
        {name: (each[i],) for name, each in eqn.params.items()}
        for i in range(len(eqn.invars))
    ]
    alone = zip(eqn.invars, eqn.outvars, params, strict=True)
    return [eqn.replace(invars=[a], outvars=[b], params=p) for a, b, p in alone]


def _implemented(eqn: Any) -> Any:
    """The equation as a call, or itself if no trace of a function says what it is."""
    function = implementation(eqn.primitive)
    if function is None or eqn.effects:
        return eqn
    kinds = [abstract_value(each.aval) for each in eqn.invars]
    try:
        with equation_context(eqn), user_context(eqn):
            made = jax.make_jaxpr(partial(function, **eqn.params))(*kinds)
    except Exception:  # a library's own code, which may need values or a host
        return eqn
    found = [abstract_value(aval) for aval in made.out_avals]
    wanted = [abstract_value(each.aval) for each in eqn.outvars]
    if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in wanted]:
        return eqn
    return plain_call(eqn, with_jaxpr(made, _rewritten))
