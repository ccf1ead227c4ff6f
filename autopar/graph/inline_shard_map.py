"""Run the body of a user's shard_map inside ours: its operands are shards already.

Our region is manual over all its axes and tracks no varying types (check_vma=False), so
the casts between those types vanish and collectives that state them lose the statement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core.primitives import all_gather_p, psum_p

from ..jax_compat import (
    CALLS,
    Literal,
    bind,
    callee,
    equation_context,
    literal_value,
    with_scan_counts,
)
from .op_graph import Operator

_IDENTITIES = frozenset(
    "pvary pcast sharding_constraint reshard mesh_cast autopar_pin".split()
)


def inline_shard_map(op: Operator, operands: Sequence[Any]) -> list[Any]:
    """The results of a shard_map on the shards that its specs name."""
    return _evaluate(op.params["jaxpr"], (), operands)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def value_of(atom: Any) -> Any:
        return literal_value(atom) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [value_of(atom) for atom in eqn.invars]
        with equation_context(eqn):
            results = _equation(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _call(called: Any, args: Sequence[Any]) -> list[Any]:
    if hasattr(called, "jaxpr"):
        return _evaluate(called.jaxpr, called.consts, args)
    return _evaluate(called, (), args)


def _equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    kind, params = eqn.primitive.name, eqn.params
    if kind in _IDENTITIES:
        return list(operands)
    if kind in CALLS:
        if params.get("prevent_cse"):  # remat: joined with the first run otherwise
            operands = lax.optimization_barrier(list(operands))
        return _call(callee(eqn), operands)
    if kind in _REBOUND:
        return _REBOUND[kind](params, operands)
    return bind(eqn.primitive, operands, params)


def _psum(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    return bind(psum_p, operands, {"axis_index_groups": None, **params})


def _all_gather(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    return bind(all_gather_p, operands, {"axis_index_groups": None, **params})


def _scan(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    counts = with_scan_counts(params)
    num_consts, num_carry = counts["num_consts"], counts["num_carry"]
    consts, rest = operands[:num_consts], operands[num_consts:]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _call(params["jaxpr"], [*consts, *carry, *slices])
        return outputs[:num_carry], outputs[num_carry:]

    carry, stacked = lax.scan(
        step,
        list(rest[:num_carry]),
        list(rest[num_carry:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = operands[:num_cond]
    body_consts = operands[num_cond : num_cond + num_body]
    return lax.while_loop(
        lambda carry: _call(params["cond_jaxpr"], [*cond_consts, *carry])[0],
        lambda carry: _call(params["body_jaxpr"], [*body_consts, *carry]),
        list(operands[num_cond + num_body :]),
    )


def _cond(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    index, *arrays = operands
    branches = [_branch(closed) for closed in params["branches"]]
    return lax.switch(index, branches, *arrays)


def _branch(closed: Any) -> Callable[..., list[Any]]:
    return lambda *arrays: _call(closed, arrays)


_REBOUND = {
    "psum_invariant": _psum,
    "all_gather_invariant": _all_gather,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
