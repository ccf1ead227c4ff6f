"""Run the blocks of a graph: one walk, whatever the values stand for.

Subclasses say what a tensor is while it runs (a shard, a microbatch) by how it is read
and written, and how an operator is bound on such values.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
from .build_graph import PINS
from .op_graph import Block, Operator, OpGraph


class BlockRunner(ABC):
    """Evaluates operators in order, and structured ones through their blocks."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph

    @abstractmethod
    def write(self, tensor: int, value: Any) -> None:
        """Keep what an operator or block input made."""

    @abstractmethod
    def operands(self, op: Operator) -> list[Any]:
        """What the operator reads, as it needs it."""

    @abstractmethod
    def outputs(self, block: Block) -> list[Any]:
        """What the block returns, as its owner needs it."""

    @abstractmethod
    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an operator that owns no block."""

    def scope(self, op: Operator) -> str:
        """The name that what an operator becomes is found under."""
        return op.name

    def run_block(self, block: Block, inputs: Sequence[Any]) -> list[Any]:
        """What `block` returns for these inputs."""
        for tensor, value in zip(block.inputs, inputs, strict=True):
            self.write(tensor, value)
        self.run_operators(block.operators)
        return self.outputs(block)

    def run_operators(self, operators: Sequence[Operator]) -> None:
        for op in operators:
            operands = self.operands(op)
            with jax.named_scope(self.scope(op)):
                results = self.execute(op, operands)
            for tensor, result in zip(op.results, results, strict=True):
                self.write(tensor, result)

    def execute(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        match op.kind:
            case "scan":
                return self.scan(op, operands)
            case "while":
                return self.while_loop(op, operands)
            case "cond":
                return self.cond(op, operands)
            case "optimization_barrier":
                return lax.optimization_barrier(tuple(operands))
            case "shard_map":
                return inline_shard_map(op, [as_array(x) for x in operands])
            case kind if kind in PINS:
                return [as_array(x) for x in operands]
        return self.bind(op, operands)

    def scan(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        body = self.graph.blocks[op.bodies[0]]
        num_consts, num_carry = op.params["num_consts"], op.params["num_carry"]
        arrays = [as_array(x) for x in operands]
        consts = arrays[:num_consts]
        init = arrays[num_consts : num_consts + num_carry]
        slices = arrays[num_consts + num_carry :]

        def step(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = self.run_block(body, [*consts, *carry, *sliced])
            return outputs[:num_carry], outputs[num_carry:]

        carry, stacked = lax.scan(
            step,
            init,
            slices,
            length=op.params["length"],
            reverse=op.params["reverse"],
            unroll=op.params["unroll"],
        )
        return [*carry, *stacked]

    def while_loop(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        condition, body = (self.graph.blocks[index] for index in op.bodies)
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        arrays = [as_array(x) for x in operands]
        cond_consts = arrays[:num_cond]
        body_consts = arrays[num_cond : num_cond + num_body]
        return lax.while_loop(
            lambda carry: self.run_block(condition, [*cond_consts, *carry])[0],
            lambda carry: self.run_block(body, [*body_consts, *carry]),
            arrays[num_cond + num_body :],
        )

    def cond(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        blocks = [self.graph.blocks[index] for index in op.bodies]
        index, *arrays = (as_array(x) for x in operands)
        branches = [functools.partial(self.run_branch, block) for block in blocks]
        return lax.switch(index, branches, *arrays)

    def run_branch(self, block: Block, *inputs: Any) -> list[Any]:
        return self.run_block(block, inputs)


def as_array(value: Any) -> Any:
    """A literal as an array; arrays as they are."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


_IDENTITIES = frozenset(
    "pvary pcast sharding_constraint reshard mesh_cast autopar_pin".split()
)


def inline_shard_map(op: Operator, operands: Sequence[Any]) -> list[Any]:
    """The results of a shard_map on the shards that its specs name.

    Our region is manual over all its axes and tracks no varying types
    (check_vma=False), so the casts between those types vanish and collectives that
    state them lose the statement.
    """
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
