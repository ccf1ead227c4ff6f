"""What no output of a jaxpr needs goes, also where JAX itself drops nothing."""

from __future__ import annotations

from typing import Any

from ..jax_compat import (
    CALLS,
    LOOPS,
    callee,
    dce_jaxpr,
    plain_call,
    with_eqns,
    with_jaxpr,
    with_jaxprs,
)

_WITH_BODIES = (*LOOPS, "shard_map")
_KEPT_WHOLE = (  # calls of which JAX drops no operand that the callee does not read
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_partitioning",
    "custom_vmap_call",
    "composite",
)


def dead_code_eliminated(closed: Any) -> Any:
    """The same jaxpr without equations that no output needs; inputs stay all.

    Rules of derivatives go as well: what only they need is dead, and the rest becomes a
    plain call, of which JAX drops what is not read. What a while loop carries stays.
    """
    return with_jaxpr(closed, lambda jaxpr: _shorter(_with_plain_calls(jaxpr)))


def _shorter(jaxpr: Any) -> Any:
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def _with_plain_calls(jaxpr: Any) -> Any:
    """Calls drop what they do not read, here and inside; while loops are shorter."""
    eqns = []
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind in CALLS or kind in _WITH_BODIES:
            eqn = with_jaxprs(eqn, _with_plain_calls)
        if kind in _KEPT_WHOLE:
            eqn = plain_call(eqn, callee(eqn))
        elif kind == "while":  # JAX drops nothing of one
            eqn = with_jaxprs(eqn, _shorter)
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)
