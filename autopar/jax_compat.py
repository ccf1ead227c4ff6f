"""The only file that may import from JAX what is not public, or differs by version."""

from __future__ import annotations

from typing import Any

from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

ClosedJaxpr = core.ClosedJaxpr
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
Var = core.Var
DropVar = core.DropVar


def dead_code_eliminated(closed: Any) -> Any:
    """The same jaxpr without equations that no output needs; inputs stay all."""
    jaxpr, _ = partial_eval.dce_jaxpr(
        closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
    )
    return ClosedJaxpr(jaxpr, closed.consts)


def source_line(eqn: Any) -> str:
    """`file.py:12:3 (function)` of the user's line that made an equation."""
    return source_info_util.summarize(eqn.source_info)


def name_scope(eqn: Any) -> str:
    """The name stack of an equation: named scopes and transformations."""
    return str(eqn.source_info.name_stack)
