"""Which side effects a step may have: callbacks that no order is asked of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..jax_compat import source_line
from .op_graph import Operator, OpGraph

CALLBACKS = ("debug_callback", "debug_print", "io_callback")


def refuse_effects(eqn: Any) -> None:
    """Does nothing if the equation has no side effect, or one that can run once.

    Raises:
      NotImplementedError: the effect is ordered, or is none of an unordered callback;
        says why and what to write instead.
    """
    if not eqn.effects:
        return
    names = sorted(type(effect).__name__ for effect in eqn.effects)
    kind, where = eqn.primitive.name, source_line(eqn)
    is_ordered = any(name.startswith("Ordered") for name in names)
    # In a user's own shard_map a callback is each device's own, as it is in jax.jit.
    is_own = kind == "shard_map" and set(names) <= {"DebugEffect", "IOEffect"}
    if is_ordered or not (kind in CALLBACKS or is_own):
        raise NotImplementedError(
            f"Side effects must be those of an unordered jax.debug.print, "
            f"jax.debug.callback or io_callback, which can run once, but {kind!r} at "
            f"{where} has {', '.join(names)}. Write ordered=False, return the value "
            f"and use it outside, or, in place of a mutable Ref, take the array as an "
            f"argument and return its next value."
        )


def refuse_lost_callbacks(graph: OpGraph, parts: Iterable[OpGraph]) -> None:
    """Does nothing if the parts of a step that was cut make the same host callbacks.

    Raises:
      NotImplementedError: a callback is in none of them, as no part reads what it
        gives; names its source line.
    """
    kept = Counter(op.source for part in parts for op in _callbacks(part))
    for op in _callbacks(graph):
        kept[op.source] -= 1
        if kept[op.source] < 0:
            raise NotImplementedError(
                f"A pipelined step may call the host only for values that it returns "
                f"or goes on with, for now, but nothing reads what {op.kind!r} at "
                f"{source_line(op.eqn)} gives; return its operands from the step and "
                f"use them outside, or plan the step without stages."
            )


def _callbacks(graph: OpGraph) -> list[Operator]:
    return [op for op in graph.operators() if op.kind in CALLBACKS]


def refuse_callbacks(graph: OpGraph) -> None:
    """Does nothing if a step calls nothing on the host that runs it.

    Raises:
      NotImplementedError: it does, and is to run on hosts that have not its Python
        code; names the operator's source line.
    """
    for op in graph.operators():
        if op.kind in (*CALLBACKS, "pure_callback"):
            raise NotImplementedError(
                f"A step that goes to other hosts must be free of host callbacks, as "
                f"Python code is not sent there, but {op.kind!r} at "
                f"{source_line(op.eqn)} is one; return the value from the step and "
                f"use it outside."
            )
