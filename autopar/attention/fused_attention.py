"""Attention as one kernel: cuDNN's operators of `jax.nn.dot_product_attention`.

A device runs the kernel on its own examples and heads, and on its own queries where
nothing hangs on where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from math import gcd, prod
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from ..graph.op_graph import Operator, TensorType
from ..jax_compat import CUDNN_ATTENTION, mlir
from ..rules.base import Factor, Shard, bind_params, register
from ..sharding.spec import REPLICATED, SUM, State
from .spec import Attention, Labels, named, wide, with_units, without_units

FORWARD, BACKWARD = KINDS = CUDNN_ATTENTION.kinds
_RUNS: dict[str, Any] = {}
_UNUSED = "_"
_CUDNN, _SPLASH = ("bthgd", "bshd", "bshe"), ("bhgtd", "bhsd", "bhse")  # q, k, v
_TPU_BLOCKS = (512, 256, 128)  # queries and keys that a kernel takes at once


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
    return list(_RUNS[op.kind](*operands, **op.params))


register(*KINDS, bind=_bind)(_factors)


def _refuse(*operands: Any, **params: Any) -> NoReturn:
    raise NotImplementedError(
        "cuDNN's attention runs on NVIDIA GPUs alone; on other devices leave out "
        "implementation='cudnn', and let attention='fused' choose the kernel."
    )


for _kind, _types, _run in zip(
    KINDS, CUDNN_ATTENTION.types, CUDNN_ATTENTION.runs, strict=True
):
    _primitive = Primitive(f"on_shard_{_kind}")  # JAX's own would ask for devices
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_types)
    mlir.register_lowering(_primitive, _refuse)
    _lowering = mlir.lower_fun(_run, multiple_results=True)
    mlir.register_lowering(_primitive, _lowering, platform="cuda")
    _RUNS[_kind] = _primitive.bind


def why_not_fused(
    a: Attention, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], family: str
) -> str:
    """What keeps attention from a kernel of `CPU`, `GPU` or `TPU`; empty if nothing.

    `shapes` and `dtypes` are those of queries, keys and values.
    """
    scores, sizes = a.scores, a.sizes(*shapes)
    if a.sides:
        return "its scores meet a bias or a mask of data"
    if not a.rows or scores.after not in (0, None):
        return "its mask is neither causal nor a window"
    if scores.before is not None and (scores.after is None or scores.before < 0):
        return "its window reaches behind a query"
    row = max(sizes[each] for each in a.rows) if a.row is None else sizes[a.row]
    if scores.before is not None and row > sizes[a.keys]:
        return "its window is beyond the last key"
    if len({*dtypes}) > 1 or "64" in dtypes[0]:
        return f"queries, keys and values are {', '.join(dtypes)}"
    depths = [prod(sizes[i] for i in named(x) if i not in a.table) for x in (a.q, a.v)]
    if family == "GPU" and dtypes[0] not in ("bfloat16", "float16"):
        return f"cuDNN takes float16 and bfloat16, but queries are {dtypes[0]}"
    if family == "TPU" and gcd(row, sizes[a.keys]) % _TPU_BLOCKS[-1]:
        return f"a sequence must be a multiple of {_TPU_BLOCKS[-1]} on TPUs"
    if family == "GPU" and any(depth > 128 or depth % 8 for depth in depths):
        return f"cuDNN takes heads of 8 to 128, but they have {depths[0]} numbers"
    return ""


def cudnn_forward(a: Attention, q: Any, k: Any, v: Any) -> list[Any]:
    """o and the log of the sum of each row's exponentials."""
    form = _Form(a, _CUDNN, q, k, v)
    o, total = form.run(FORWARD, is_training=True)
    return [form.taken_o(o), form.taken(total, a.statistics, "bhgt")]


def cudnn_backward(
    a: Attention, q: Any, k: Any, v: Any, o: Any, total: Any, d_o: Any
) -> list[Any]:
    """Gradients of q, k and v."""
    form = _Form(a, _CUDNN, q, k, v)
    total = form.laid_out(total, a.statistics, "bhgt")
    return form.gradients(form.run(BACKWARD, total, *map(form.laid_out_o, (o, d_o))))


def splash_forward(a: Attention, q: Any, k: Any, v: Any) -> list[Any]:
    """o, and zeros: the backward pass makes its own statistics."""
    form = _Form(a, _SPLASH, q, k, v)
    o = _splash(a, *form.operands)
    total = jnp.zeros(o.shape[:-1], wide(a.score_dtype))
    return [form.taken_o(o), form.taken(total, a.statistics, "bhgt")]


def splash_backward(
    a: Attention, q: Any, k: Any, v: Any, o: Any, total: Any, d_o: Any
) -> list[Any]:
    """Gradients of q, k and v."""
    form = _Form(a, _SPLASH, q, k, v)
    _, back = jax.vjp(partial(_splash, a), *form.operands)
    return form.gradients(back(form.laid_out_o(d_o)))


def _splash(a: Attention, q: Any, k: Any, v: Any) -> Any:
    """JAX's kernel for TPUs, of operands bhtd, bhsd and bhse."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    scores, shape = a.scores, (q.shape[2], k.shape[2])
    if scores.before is not None:
        mask: Any = kernels.LocalMask(shape, (scores.before, 0), 0)
    else:
        mask = (kernels.FullMask if scores.after is None else kernels.CausalMask)(shape)
    size = next(each for each in _TPU_BLOCKS if gcd(*shape) % each == 0)
    sizes = [each.name for each in fields(kernels.BlockSizes)]
    blocks: Any = {name: size for name in sizes if name.startswith("block")}
    kernel = kernels.make_splash_mha_single_device(
        kernels.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=kernels.BlockSizes(**blocks),
    )
    return jax.vmap(kernel)((scores.scale * q).astype(q.dtype), k, v)


class _Form:
    """Labels of attention as the dims of a kernel: b, t, s, h (and g), d, e.

    A head of keys, one of h, is read by g heads of queries, which follow each other.
    `terms` are the dims of queries, keys and values; `operands` are these laid out so.
    """

    def __init__(self, a: Attention, terms: Sequence[str], *given: Any) -> None:
        self.attention, self.sizes = a, a.sizes(*(x.shape for x in given))
        self.terms, self.dtype = terms, given[0].dtype
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
        labels = (a.q, a.k, a.v)
        self.operands = list(map(self.laid_out, given, labels, terms))
        self.o_term = terms[0].replace("d", "e")

    def laid_out(self, x: Any, labels: Labels, term: str) -> Any:
        """`x` with the dims of `term`, of which h and g are one."""
        own, wanted = named(labels), [i for each in term for i in self.labels[each]]
        moved = jnp.transpose(without_units(x, labels), [own.index(i) for i in wanted])
        both = {"h": "hg" if "g" in term else "h", "g": ""}
        parts = (both.get(each, each) for each in term)
        shape = (
            prod(self.sizes[i] for letter in part for i in self.labels[letter])
            for part in parts
            if part
        )
        return moved.reshape(*shape)

    def laid_out_o(self, o: Any) -> Any:
        return self.laid_out(o, self.attention.o, self.o_term).astype(self.dtype)

    def taken(self, x: Any, labels: Labels, term: str) -> Any:
        """The inverse of `laid_out`."""
        order = [i for each in term for i in self.labels[each]]
        apart = x.reshape([self.sizes[i] for i in order])
        moved = jnp.transpose(apart, [order.index(i) for i in named(labels)])
        return with_units(moved, labels)

    def taken_o(self, o: Any) -> Any:
        a = self.attention
        return self.taken(o, a.o, self.o_term).astype(a.o_dtype)

    def gradients(self, made: Sequence[Any]) -> list[Any]:
        a, terms = self.attention, self.terms
        wanted = zip(made, (a.d_q, a.d_k, a.d_v), terms, a.gradient_dtypes, strict=True)
        return [self.taken(x, n, term).astype(dtype) for x, n, term, dtype in wanted]

    def run(self, kind: str, *others: Any, **more: Any) -> list[Any]:
        """What cuDNN makes."""
        scores, masks = self.attention.scores, CUDNN_ATTENTION.masks
        return _RUNS[kind](
            *self.operands,
            *[jnp.zeros(0, self.dtype)] * 7,  # which JAX has for what is not there
            *others,
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


KERNELS = {  # by platform, forward and backward
    "cuda": (cudnn_forward, cudnn_backward),
    "tpu": (splash_forward, splash_backward),
}
