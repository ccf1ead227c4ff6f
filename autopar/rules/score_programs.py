"""What attention does to its scores, as a program over blocks of them.

A program is a straight line of elementwise operators, with reductions, broadcasts and
transposes, whose dims are *labelled*: a label is a dim of the scores (queries, keys,
heads, ...), None a dim of size 1. So it runs on a block of any size of every label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.op_graph import Constant, Operator
from ..jax_compat import bind

Labels = tuple[int | None, ...]
Sizes = Mapping[int, int]  # by label
Ref = int | Constant

_PRECISE_ANYWAY = ("reduce_precision", "stop_gradient")


def shape_of(labels: Labels, sizes: Sizes) -> tuple[int, ...]:
    """The shape of what has these labels."""
    return tuple(1 if each is None else sizes[each] for each in labels)


@dataclass(frozen=True)
class Step:
    """One operator: it reads values by number, or literals, and makes the next one.

    `text` stands for all of it in comparisons.
    """

    text: str
    kind: str = field(compare=False)
    primitive: Any = field(compare=False, repr=False)
    params: Mapping[str, Any] = field(compare=False, repr=False)
    operands: tuple[Ref, ...] = field(compare=False, repr=False)
    labels: Labels = field(compare=False, repr=False)

    @classmethod
    def of(cls, op: Operator, operands: Sequence[Ref], labels: Labels) -> Step:
        """The step that an operator is; shapes are those of labels from now on."""
        params = dict(op.params)
        for name in ("shape", "new_sizes", "sharding", "out_sharding"):
            if name in params:
                params[name] = None
        read = [
            f"{o.value!r}:{o.type}" if isinstance(o, Constant) else f"%{o}"
            for o in operands
        ]
        settings = sorted((k, str(v)) for k, v in params.items())
        text = f"{op.kind}({', '.join(read)}) {settings} {labels}"
        return cls(
            *(text, op.kind, op.eqn.primitive, op.params),
            tuple(operands),
            labels,
        )

    def run(self, operands: Sequence[Any], sizes: Sizes, *, is_exact: bool) -> Any:
        """The result for operands of these sizes."""
        shape = shape_of(self.labels, sizes)
        match self.kind:
            case "broadcast_in_dim":
                x = jnp.asarray(operands[0])
                return lax.broadcast_in_dim(
                    x, shape, self.params["broadcast_dimensions"]
                )
            case "reshape" | "squeeze" | "expand_dims":
                return lax.reshape(operands[0], shape)
            case "convert_element_type":
                dtype = self.params["new_dtype"]
                if is_exact and jnp.issubdtype(dtype, jnp.inexact):
                    dtype = jnp.float64
                return lax.convert_element_type(operands[0], dtype)
            case kind if is_exact and kind in _PRECISE_ANYWAY:
                return operands[0]
        return bind(self.primitive, operands, self.params)[0]


@dataclass(frozen=True)
class Program:
    """Steps over values: 0 is the scores, then come `num_sides` others, then results.

    `result` is the number of the value that is returned.
    """

    num_sides: int
    steps: tuple[Step, ...]
    result: int

    def __call__(self, scores: Any, sides: Sequence[Any], sizes: Sizes) -> jax.Array:
        """The result for a block of scores; sides are cut to the block before."""
        return self.values(scores, sides, sizes)[self.result]

    def values(
        self, scores: Any, sides: Sequence[Any], sizes: Sizes, *, is_exact: bool = False
    ) -> list[Any]:
        """Everything that is read or made; `is_exact`: in double precision."""
        assert len(sides) == self.num_sides
        values: list[Any] = [scores, *sides]
        for step in self.steps:
            operands = [
                _literal(o, is_exact) if isinstance(o, Constant) else values[o]
                for o in step.operands
            ]
            values.append(step.run(operands, sizes, is_exact=is_exact))
        return values


def _literal(constant: Constant, is_exact: bool) -> Any:
    dtype = constant.type.dtype
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return np.asarray(constant.value, np.float64 if is_exact and is_float else dtype)
