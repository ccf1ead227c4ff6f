"""What no output of a jaxpr needs goes, also where JAX itself drops nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..jax_compat import (
    CALLS,
    LOOPS,
    ClosedJaxpr,
    Jaxpr,
    callee,
    dce_jaxpr,
    plain_call,
    with_eqns,
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

    Repeated until nothing goes: what a loop hands on unread is dead code, too. Rules of
    derivatives go as well: what only they need is dead, and the rest becomes a plain
    call, of which JAX drops what is not read. What is carried around a scan only to be
    carried around a while loop in its body stays.
    """
    jaxpr = closed.jaxpr
    while True:
        outputs = [True] * len(jaxpr.outvars)
        jaxpr, _ = dce_jaxpr(jaxpr, outputs, instantiate=True)
        shorter = _without_unread(jaxpr)
        if shorter is jaxpr:
            return ClosedJaxpr(jaxpr, closed.consts)
        jaxpr = shorter


def _without_unread(jaxpr: Any) -> Any:
    """No call or while loop is given what it does not read, here or inside."""
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    read |= {id(v) for v in jaxpr.outvars}
    eqns = []
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind in CALLS or kind in _WITH_BODIES:
            eqn = with_jaxprs(eqn, _without_unread)
        if kind in _KEPT_WHOLE:
            eqn = plain_call(eqn, callee(eqn))
        elif kind == "while":
            eqn = _while_without_unread(eqn, [id(v) in read for v in eqn.outvars])
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)


def _while_without_unread(eqn: Any, read: Sequence[bool]) -> Any:
    """A loop without constants and carries that matter neither to it nor after it.

    `read` says which of its results are. JAX itself drops nothing from while loops.
    """
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    _, used = dce_jaxpr(condition.jaxpr, [True])
    carried = [a or b for a, b in zip(used[num_cond:], read, strict=True)]
    while True:
        kept = [False] * num_body + carried
        shorter, used = dce_jaxpr(body.jaxpr, carried, instantiate=kept)
        body_consts, reached = used[:num_body], used[num_body:]
        if reached == carried:
            break
        carried = reached
    kept = [False] * num_cond + carried
    test, used = dce_jaxpr(condition.jaxpr, [True], instantiate=kept)
    cond_consts = used[:num_cond]
    if (
        all((*cond_consts, *body_consts, *carried))
        and _length(test) == _length(condition.jaxpr)
        and _length(shorter) == _length(body.jaxpr)
    ):
        return eqn
    given = [*cond_consts, *body_consts, *carried]
    return eqn.replace(
        invars=[v for v, keep in zip(eqn.invars, given, strict=True) if keep],
        outvars=[v for v, keep in zip(eqn.outvars, carried, strict=True) if keep],
        params={
            **params,
            "cond_jaxpr": condition.replace(jaxpr=test),
            "body_jaxpr": body.replace(jaxpr=shorter),
            "cond_nconsts": sum(cond_consts),
            "body_nconsts": sum(body_consts),
        },
    )


def _length(value: Any) -> int:
    """Equations and their operands and results, those of calls and bodies included."""
    if isinstance(value, (tuple, list)):
        return sum(_length(each) for each in value)
    if not isinstance(value, Jaxpr):  # since jax 0.11 all are, closed or not
        return _length(value.jaxpr) if isinstance(value, ClosedJaxpr) else 0
    own = sum(1 + len(eqn.invars) + len(eqn.outvars) for eqn in value.eqns)
    return own + sum(_length(list(eqn.params.values())) for eqn in value.eqns)
