"""No operator of a graph makes what nobody reads, however deep it was written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.graph.traced_function import Roles

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@jax.custom_vjp
def ignoring(x: Any, unread: Any) -> Any:
    lax.erf(unread)
    return jnp.tanh(x)


ignoring.defvjp(
    lambda x, unread: (ignoring(x, unread), x), lambda x, g: (g * jnp.cos(x), None)
)


@jax.custom_jvp
def picking(x: Any, unread: Any) -> Any:
    return jnp.tanh(x), lax.erf(unread)


picking.defjvp(lambda x, t: (picking(*x), picking(*t)))


def picked(x: Any, unread: Any) -> Any:
    return picking(x, unread)[0]


@jax.custom_batching.custom_vmap
def batching(x: Any, unread: Any) -> Any:
    lax.erf(unread)
    return jnp.tanh(x)


@batching.def_vmap
def _(size: Any, are_batched: Any, x: Any, unread: Any) -> Any:
    return batching(x, unread), True


CALLED = [
    ignoring,
    picked,
    batching,
    jax.jit(picked),
    jax.checkpoint(ignoring),
    jax.jit(jax.checkpoint(jax.jit(ignoring))),
    jax.custom_gradient(lambda x, unread: (picked(x, unread), lambda g: (g, None))),
]


def in_the_step(call: Callable[..., Any], x: Any) -> Any:
    return call(x, lax.erf(x))


def in_a_branch(call: Callable[..., Any], x: Any) -> Any:
    unread = lax.erf(x)
    branches = [lambda x, y: call(x, lax.erf(y)), lambda x, y: jnp.sin(x)]
    return lax.switch(jnp.int32(x[0, 0]), branches, x, unread)


def in_a_scan(call: Callable[..., Any], x: Any) -> Any:
    unread = lax.erf(x)

    def step(carry: Any, row: Any) -> Any:
        total, gone = carry
        return (call(total, unread) + row, lax.erf(gone + total)), lax.erf(gone)

    return lax.scan(step, (x[0], unread[0]), x)[0][0]


def in_a_while_loop(call: Callable[..., Any], x: Any) -> Any:
    """The count and the total matter; of the rest one result feeds the other."""
    unread = lax.erf(x)

    def step(carry: Any) -> Any:
        count, total, gone, last = carry
        lax.erf(total)
        return count + 1, call(total, unread + gone), lax.erf(total), lax.erf(gone)

    state = (0, x, lax.erf(unread), lax.erf(x))
    return lax.while_loop(lambda carry: carry[0] < 3, step, state)[1]


def in_nested_loops(call: Callable[..., Any], x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        inner = lax.while_loop(
            lambda c: c[0] < 2,
            lambda c: (c[0] + 1, in_a_branch(call, c[1]), lax.erf(c[2])),
            (0, carry, lax.erf(carry)),
        )
        return inner[1], lax.erf(inner[2])

    return lax.scan(step, x, None, length=3)[0]


@pytest.mark.parametrize("call", CALLED, ids=range(len(CALLED)))
@pytest.mark.parametrize(
    "place",
    [in_the_step, in_a_branch, in_a_scan, in_a_while_loop, in_nested_loops],
)
def test_nothing_unread_is_left(place: Any, call: Any) -> None:
    graph = graph_of(lambda x: place(call, x), X)
    assert dead_operators(graph) == []
    kinds = [op.kind for op in graph.operators()]
    assert "tanh" in kinds
    assert "erf" not in kinds


def test_what_feeds_a_condition_stays() -> None:
    """The result is not read, but it says how often the other one is made."""

    def function(x: Any) -> Any:
        def step(carry: Any) -> Any:
            total, length, limit = carry
            return jnp.tanh(total), length + lax.erf(limit), limit * 2

        state = (x, x.sum(), x.max())
        return lax.while_loop(lambda carry: carry[1] < 3, step, state)[0]

    graph = graph_of(function, X)
    (loop,) = [op for op in graph.operators() if op.kind == "while"]
    assert len(loop.results) == 3
    assert "erf" in [op.kind for op in graph.operators()]


def test_a_callback_of_dead_values_stays() -> None:
    def function(x: Any) -> Any:
        def step(carry: Any) -> Any:
            count, total, gone = carry
            jax.debug.callback(lambda value: None, lax.erf(gone))
            return count + 1, jnp.tanh(total), lax.erf(gone)

        state = (0, x, x + 1)
        return lax.while_loop(lambda carry: carry[0] < 3, step, state)[1]

    kinds = [op.kind for op in graph_of(function, X).operators()]
    assert kinds.count("erf") == 2
    assert "debug_callback" in kinds


def graph_of(function: Callable[..., Any], *args: Any) -> OpGraph:
    traced = trace(function, args, {})
    count = len(traced.input_paths)
    return build_graph(traced, Roles(("other",) * count, (None,) * count, ()))


def dead_operators(graph: OpGraph) -> list[str]:
    """Operators without effects of which no result is an operand or an output."""
    read = {o for op in graph.operators() for o in op.operands if isinstance(o, int)}
    read |= {o for block in graph.blocks for o in block.outputs if isinstance(o, int)}
    return [
        op.name
        for op in graph.operators()
        if not op.eqn.effects and not read.intersection(op.results)
    ]
