"""Which operators do most of the work of a step: matrix products and factorisations."""

from __future__ import annotations

import numpy as np

from ..jax_compat import CUDNN_ATTENTION
from .build_graph import STRUCTURED
from .op_graph import GraphColumns, Operator, OpGraph, TensorType

PRODUCTS = frozenset(
    (
        *"dot_general ragged_dot_general conv_general_dilated".split(),
        *"autopar_attention autopar_attention_backward".split(),
        *"autopar_fused_attention autopar_fused_attention_backward".split(),
        *CUDNN_ATTENTION.kinds,
    )
)
FACTORISATIONS = frozenset(
    "cholesky lu geqrf qr householder_product triangular_solve eigh eig svd schur"
    " hessenberg tridiagonal".split()
)


def is_heavy(primitive_name: str) -> bool:
    """Whether work grows faster than data: products, convolutions, factorisations.

    What is heavy is worth splitting and never worth doing twice.
    """
    return primitive_name in PRODUCTS or primitive_name in FACTORISATIONS


def accumulation_dtype(kind: TensorType) -> np.dtype:
    """The dtype, with JAX's small floats (which numpy does not class) as float16."""
    name = kind.dtype.name
    small = name.startswith(("bfloat", "float8", "float4", "float6"))
    return np.dtype(np.float16) if small else np.dtype(kind.dtype)


def is_heavy_operator(op: Operator) -> bool:
    """Whether repeating this operator's work on every device would be waste."""
    return is_heavy(op.kind)


def holds_heavy_work(graph: OpGraph, op: Operator) -> bool:
    """Whether an operator is heavy, or runs one that is."""
    return is_heavy_operator(op) or any(
        holds_heavy_work(graph, inner)
        for body in op.bodies
        for inner in graph.blocks[body].operators
    )


def heavy_rows(columns: GraphColumns) -> np.ndarray:
    """Rows of the heavy operators, those in bodies but not what runs these."""
    return np.flatnonzero(
        columns.where(lambda op: op.kind not in STRUCTURED and is_heavy_operator(op))
    )
