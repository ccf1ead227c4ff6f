"""Attention as one kernel: cuDNN's operators of `jax.nn.dot_product_attention`.

A device runs the kernel on its own examples and heads, and on its own queries where
nothing hangs on where they are. On other devices than NVIDIA's the same is done by
plain operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from ..graph.op_graph import Operator, TensorType
from ..jax_compat import CUDNN_ATTENTION, mlir
from ..sharding.spec import REPLICATED, SUM, State
from .attention_spec import (
    Attention,
    Labels,
    Scores,
    named,
    wide,
    with_units,
    without_units,
)
from .base import Factor, Shard, bind_params, register
from .ring import Ring, attend, attend_backward

FORWARD, BACKWARD = KINDS = CUDNN_ATTENTION.kinds
_ON_SHARD = {kind: Primitive(f"on_shard_{kind}") for kind in KINDS}
_UNUSED = "_"


def terms_of(op: Operator) -> tuple[list[str], list[str]]:
    """A letter for each dim of each operand and result.

    b(atch), t(arget: queries), s(ource: keys), h(eads), d(epth), e: that of values.
    """
    is_heads_first = op.params["layout"]
    q, k = ("bhtd", "bhsd") if is_heads_first else ("bthd", "bshd")
    o, v = q.replace("d", "e"), k.replace("d", "e")
    bias, *lengths = (
        _present(term, kind)
        for term, kind in zip(
            ("bhts", "b", "b", "b_", "b_", "____", "____"),
            op.operand_types[3:10],
            strict=True,
        )
    )
    operands = [q, k, v, bias, *lengths]
    if op.kind == FORWARD:
        return operands, [o, "bht"][: len(op.results)]
    return [*operands, "bht", o, o], [q, k, v, bias][: len(op.results)]


def _present(term: str, kind: TensorType) -> str:
    """`term` for what is there; JAX hands on an empty array for what is not."""
    if not kind.size:
        return _UNUSED * kind.rank
    pairs = zip(term, kind.shape, strict=True)
    return "".join(_UNUSED if size == 1 else letter for letter, size in pairs)


def _factors(op: Operator) -> list[Factor]:
    operands, results = terms_of(op)
    params, (q, k) = op.params, op.operand_types[:2]
    is_paged = op.operand_types[8].size > 0
    if params["dropout_rate"] or is_paged:  # all shards would drop the same weights
        return []
    is_everywhere_alike = params["mask_type"].name == "NO_MASK"
    is_everywhere_alike &= params["sliding_window_length"] is None
    sizes = {"b": q.shape[0], "h": k.shape[operands[1].index("h")]}
    if is_everywhere_alike and not op.operand_types[6].size:
        sizes["t"] = q.shape[operands[0].index("t")]
    missing = REPLICATED if op.kind == FORWARD else SUM

    def states(terms: Sequence[str], name: str, other: State) -> tuple[State, ...]:
        return tuple(t.index(name) if name in t else other for t in terms)

    return [
        Factor(
            name,
            states(operands, name, REPLICATED),
            states(results, name, missing),
            size,
        )
        for name, size in sizes.items()
    ]


def _bind(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    if not shard.is_of_program:  # but of a step that is traced again
        return bind_params(op, operands)
    return _ON_SHARD[op.kind].bind(*operands, **op.params)


register(*KINDS, bind=_bind)(_factors)


def _plain(*operands: Any, **params: Any) -> list[Any]:
    """What the kernels make, by plain operators and in one block."""
    q, k, v, *others = operands[:10]
    if params["dropout_rate"] or any(each.size for each in others):
        raise NotImplementedError(
            "Attention by cuDNN with a bias, a mask, lengths or dropout runs on NVIDIA "
            "GPUs alone; on other devices leave out implementation='cudnn'."
        )
    b, t, s, h, d, e, g = range(7)
    heads_first, window = params["layout"], params["sliding_window_length"]
    is_causal = params["mask_type"].name == "CAUSAL" or window is not None
    q_labels, o = (
        ((b, h, g, t, n) if heads_first else (b, t, h, g, n)) for n in (d, e)
    )
    k_labels, v_labels = (
        ((b, h, s, n) if heads_first else (b, s, h, n)) for n in (d, e)
    )
    types = (q.dtype.name, k.dtype.name, v.dtype.name)
    attention = Attention(
        *(q_labels, k_labels, v_labels, o, q_labels, k_labels, v_labels),
        *((b, h, g, t, s), s, ()),
        Scores(
            params["scale"],
            low=-inf,
            before=None if window is None else window - 1,
            after=0 if is_causal else None,
        ),
        *(wide(q.dtype).name, q.dtype.name, types),
        row=t,
    )
    at, num_heads = (1, k.shape[1]) if heads_first else (2, k.shape[2])

    def grouped(x: Any, at: int = at) -> Any:
        shape = (*x.shape[:at], num_heads, -1, *x.shape[at + 1 :])
        return x.reshape(shape)

    def flat(x: Any, at: int = at) -> Any:
        return x.reshape((*x.shape[:at], -1, *x.shape[at + 2 :]))

    q, ring = grouped(q), Ring()
    if len(operands) == 10:
        o, total, *_ = attend(attention, q, k, v, (), ring, 0, keeps=False)
        made = [flat(o), flat(total, 1).astype(jnp.float32)]
        return made if params["is_training"] else made[:1]
    total, o, d_o = operands[10:]
    given = grouped(o), grouped(total, 1), grouped(d_o)
    d_q, d_k, d_v = attend_backward(
        attention, q, k, v, *given, (), ring, 0, keeps=False
    )
    return [flat(d_q), d_k, d_v]


for _kind, _types, _cudnn in (
    (FORWARD, CUDNN_ATTENTION.forward_types, CUDNN_ATTENTION.forward),
    (BACKWARD, CUDNN_ATTENTION.backward_types, CUDNN_ATTENTION.backward),
):
    _primitive = _ON_SHARD[_kind]
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_types)
    for _run, _platform in ((_plain, None), (_cudnn, "cuda")):
        _lowering = mlir.lower_fun(_run, multiple_results=True)
        mlir.register_lowering(_primitive, _lowering, platform=_platform)


def why_not_fused(
    a: Attention, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], family: str
) -> str:
    """What keeps attention from a kernel of `CPU`, `GPU` or `TPU`; empty if nothing.

    `shapes` and `dtypes` are those of queries, keys and values.
    """
    scores, sizes = a.scores, a.sizes(*shapes)
    if a.sides or scores.cap:
        return "its scores are capped, or meet a bias, a mask of data or dropout"
    if not a.rows or scores.after not in (0, None):
        return "its mask is neither causal nor a window"
    if scores.before is not None and (scores.after is None or scores.before < 0):
        return "its window reaches behind a query"
    row = max(sizes[each] for each in a.rows) if a.row is None else sizes[a.row]
    if scores.before is not None and row > sizes[a.keys]:
        return "its window is beyond the last key"
    if len({*dtypes}) > 1 or "64" in dtypes[0]:
        return f"queries, keys and values are {', '.join(dtypes)}"
    form = _Form(a, *shapes)
    depths = [form._size(each, "") for each in "de"]
    if family == "GPU" and dtypes[0] not in ("bfloat16", "float16"):
        return f"cuDNN takes float16 and bfloat16, but queries are {dtypes[0]}"
    if family == "GPU" and any(depth > 128 or depth % 8 for depth in depths):
        return f"cuDNN takes heads of 8 to 128, but they have {depths[0]} numbers"
    return ""


def fused_forward(a: Attention, q: Any, k: Any, v: Any) -> list[Any]:
    """o and the log of the sum of each row's exponentials."""
    form = _Form(a, q.shape, k.shape, v.shape)
    operands = form.given(q, k, v)
    o, total = form.run(FORWARD, operands, is_training=True)
    o = form.taken(o, a.o, "bthge").astype(a.o_dtype)
    return [o, form.taken(total, a.statistics, "bhgt")]


def fused_backward(
    a: Attention, q: Any, k: Any, v: Any, o: Any, total: Any, d_o: Any
) -> list[Any]:
    """Gradients of q, k and v."""
    form = _Form(a, q.shape, k.shape, v.shape)
    rest = form.laid_out(total, a.statistics, "bhgt", "bht")
    outputs = (form.laid_out(x, a.o, "bthge", "bthe").astype(q.dtype) for x in (o, d_o))
    made = form.run(BACKWARD, [*form.given(q, k, v), rest, *outputs])
    wanted = ((a.d_q, "bthgd"), (a.d_k, "bshd"), (a.d_v, "bshe"))
    return [
        form.taken(x, labels, letters).astype(dtype)
        for x, (labels, letters), dtype in zip(
            made, wanted, a.gradient_dtypes, strict=True
        )
    ]


class _Form:
    """Labels of attention as the dims of a kernel: b, t, s, h (and g), d, e.

    A head of keys, one of h, is read by g heads of queries, which follow each other.
    """

    def __init__(self, a: Attention, *shapes: Sequence[int]) -> None:
        self.attention, self.sizes = a, a.sizes(*shapes)
        shared = [label for label in named(a.q) if label in a.k and label in a.v]
        rows = sorted(a.rows, key=self.sizes.__getitem__)
        row = rows[-1:] if a.row is None else [a.row]
        self.labels: dict[str, list[int]] = {
            "b": shared[:-1] if len(shared) > 1 else shared,
            "h": shared[-1:] if len(shared) > 1 else [],
            "t": row,
            "s": [a.keys],
            "g": [label for label in a.rows if label not in row],
            "d": [label for label in named(a.q) if label not in a.table],
            "e": [label for label in named(a.v) if label not in (*shared, a.keys)],
        }

    def given(self, q: Any, k: Any, v: Any) -> list[Any]:
        """All operands of the forward kernel."""
        a, unused = self.attention, jnp.zeros(0, q.dtype)
        made = [self.laid_out(q, a.q, "bthgd", "bthd")]
        made += [self.laid_out(k, a.k, "bshd"), self.laid_out(v, a.v, "bshe")]
        return [*made, *[unused] * 7]

    def laid_out(self, x: Any, labels: Labels, letters: str, joined: str = "") -> Any:
        """`x` with the dims `letters`; h and g are one, h, if they are `joined`."""
        own, wanted = named(labels), [i for each in letters for i in self.labels[each]]
        moved = jnp.transpose(without_units(x, labels), [own.index(i) for i in wanted])
        return moved.reshape([self._size(each, joined) for each in joined or letters])

    def taken(self, x: Any, labels: Labels, letters: str) -> Any:
        """The inverse of `laid_out`."""
        order = [i for each in letters for i in self.labels[each]]
        apart = x.reshape([self.sizes[i] for i in order])
        moved = jnp.transpose(apart, [order.index(i) for i in named(labels)])
        return with_units(moved, labels)

    def _size(self, letter: str, joined: str) -> int:
        letters = "hg" if letter == "h" and joined else letter
        return prod(self.sizes[i] for each in letters for i in self.labels[each])

    def run(self, kind: str, operands: Sequence[Any], **more: Any) -> list[Any]:
        scores, masks = self.attention.scores, CUDNN_ATTENTION.masks
        return _ON_SHARD[kind].bind(
            *operands,
            scale=scores.scale,
            seed=0,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=masks.NO_MASK if scores.after is None else masks.CAUSAL,
            layout=0,
            sliding_window_length=(
                None if scores.before is None else scores.before + 1
            ),
            **more,
        )
