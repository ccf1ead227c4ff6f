"""Flops and seconds of one operator on one device, from its local shapes.

A roofline (Williams, Waterman and Patterson 2009): an operator takes the time of its
flops or of its memory traffic, whichever is longer. Operators that XLA fuses into their
neighbours start no kernel of their own and keep part of their traffic on the chip.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..clusters.cluster import Cluster
from ..graph.op_graph import Operator
from ..graph.work import is_heavy
from ..jax_compat import CUDNN_ATTENTION, inner_jaxprs

Shape: TypeAlias = tuple[int, ...]
Params: TypeAlias = Mapping[str, Any]
_Flops: TypeAlias = Callable[[Params, Sequence[Shape], Sequence[Shape]], float]

FUSED_FRACTION = 0.35
"""Fraction of a fusable operator's operand and result bytes that reaches memory.

Measured as the compiled bytes of whole steps, less those of unfused operators, over the
bytes of fusable ones: 0.37 for a two-layer GPT with Adam, 0.38 for its gradient alone,
0.25 for an MLP with SGD (jax 0.10.2, CPU).
"""

TRANSCENDENTAL_FLOPS = 10.0
"""Flops charged for one exp, log, tanh and the like: a polynomial of that degree."""

ATTENTION_RATES = (0.75, 0.6)
"""Part of products' rate that fused attention reaches, forward and backward: cuDNN's
600 and 370 Tflop/s forward without and with a mask on an H100 (Shah et al., 2024)."""

RANDOM_FLOPS = 100.0
"""Flops charged for one 32-bit word of threefry2x32: 20 rounds of about 5."""

_FREE = frozenset(
    "after_all autopar_relayout_like axis_index bitcast_convert_type"
    " broadcast_in_dim broadcast_to create_token device_put iota name"
    " optimization_barrier pvary random_unwrap random_wrap reshape sharding_constraint"
    " squeeze stop_gradient zeros_like".split()
)
_MOVING = frozenset(
    "concatenate convert_element_type copy dynamic_slice dynamic_update_slice gather"
    " pad real imag rev scatter select_n slice split stack transpose unstack".split()
)
TRANSCENDENTAL = frozenset(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma"
    " erf erf_inv erfc exp exp2 expm1 igamma igammac lgamma log log1p logistic"
    " polygamma pow random_gamma regularized_incomplete_beta rsqrt sin sinh sqrt"
    " tan tanh zeta".split()
)
_REDUCTIONS = frozenset(
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and"
    " reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
    " scatter-add scatter-max scatter-min scatter-mul scatter-sub".split()
)
_UNFUSED = frozenset(
    "concatenate copy cumlogsumexp cummax cummin cumprod cumsum dynamic_update_slice"
    " ffi_call fft gather pallas_call reduce_window reduce_window_max"
    " reduce_window_min reduce_window_sum rng_bit_generator scatter scatter-add"
    " scatter-max scatter-min scatter-mul scatter-sub select_and_gather_add"
    " select_and_scatter_add sort stack top_k transpose".split()
)
_CONTROL_FLOW = frozenset(
    "call closed_call cond custom_jvp_call custom_vjp_call custom_vmap_call jit remat2"
    " scan shard_map while".split()
)


def flops(
    primitive_name: str,
    params: Params,
    operand_shapes: Sequence[Shape],
    result_shapes: Sequence[Shape],
) -> float:
    """Floating-point operations of one jaxpr eqn on one device.

    Args:
      primitive_name: name of its primitive; an unknown one counts as elementwise.
      params: its params.
      operand_shapes: local shape of each operand.
      result_shapes: local shape of each result.

    Returns:
      Flops, a multiply-add being two. Data movement has none.

    Raises:
      ValueError: the eqn holds jaxprs, whose eqns are to be counted instead.
    """
    if primitive_name in _CONTROL_FLOW:
        raise ValueError(
            f"flops counts one operator, but {primitive_name!r} holds a jaxpr; sum its "
            "body's operators, times its trip count."
        )
    if primitive_name in _FREE or primitive_name in _MOVING:
        return 0.0
    if primitive_name in _FLOPS:
        return _FLOPS[primitive_name](params, operand_shapes, result_shapes)
    if primitive_name in _REDUCTIONS:
        # The last operand of a scatter is its updates, the only ones combined.
        combined = operand_shapes[-1 if "scatter" in primitive_name else 0]
        return float(math.prod(combined))
    num_results = float(sum(math.prod(shape) for shape in result_shapes))
    if primitive_name in TRANSCENDENTAL:
        return TRANSCENDENTAL_FLOPS * num_results
    return num_results


def operator_seconds(
    primitive_name: str,
    num_flops: float,
    num_bytes: float,
    dtype: Any,
    cluster: Cluster,
) -> float:
    """Seconds that one operator takes on one device.

    Args:
      primitive_name: name of its primitive.
      num_flops: its `flops`.
      num_bytes: bytes of its local operands and results together.
      dtype: dtype of its first operand, or the dtype's name.
      cluster: gives the device's speeds and the time to start a kernel.
    """
    if primitive_name in _FREE:
        return 0.0
    device = cluster.device
    is_fused = is_fusable(primitive_name)
    moved_bytes = num_bytes * (FUSED_FRACTION if is_fused else 1.0)
    size = max(num_flops, 1.0) if is_heavy(primitive_name) else math.inf
    rate = device.flops_per_second(dtype, size) * _RATES.get(primitive_name, 1.0)
    compute_seconds = num_flops / rate
    memory_seconds = moved_bytes / device.bytes_per_second
    launch_seconds = 0.0 if is_fused else cluster.kernel_seconds
    return launch_seconds + max(compute_seconds, memory_seconds)


def is_fusable(primitive_name: str) -> bool:
    """Whether XLA merges the operator into its neighbours' kernels."""
    return not (is_heavy(primitive_name) or primitive_name in _UNFUSED)


def _dot_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    lhs = operand_shapes[0]
    depth = math.prod(lhs[dim] for dim in contracted)
    return 2.0 * math.prod(result_shapes[0]) * depth


def _ragged_dot_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    (contracted, _), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs, ragged = operand_shapes[0], params["ragged_dot_dimension_numbers"]
    depth = math.prod(lhs[dim] for dim in contracted)
    num_results = math.prod(result_shapes[0])
    # A ragged contracted dim is shared out among the groups that lead the result.
    if set(ragged.lhs_ragged_dimensions) & set(contracted):
        num_results //= max(result_shapes[0][0], 1)
    return 2.0 * num_results * depth


def _conv_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    """As XLA counts: only window positions that fall on an input element."""
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    lhs, rhs = operand_shapes[:2]
    positions = 1
    for i, (lhs_dim, rhs_dim, out_dim) in enumerate(
        zip(lhs_spec[2:], rhs_spec[2:], out_spec[2:], strict=True)
    ):
        positions *= _num_window_positions(
            input_size=lhs[lhs_dim],
            window_size=rhs[rhs_dim],
            output_size=result_shapes[0][out_dim],
            stride=params["window_strides"][i],
            low_padding=params["padding"][i][0],
            input_dilation=params["lhs_dilation"][i],
            window_dilation=params["rhs_dilation"][i],
        )
    batch = lhs[lhs_spec[0]] // params["batch_group_count"]
    return 2.0 * batch * rhs[rhs_spec[0]] * rhs[rhs_spec[1]] * positions


def _num_window_positions(
    input_size: int,
    window_size: int,
    output_size: int,
    stride: int,
    low_padding: int,
    input_dilation: int,
    window_dilation: int,
) -> int:
    """Pairs of output and window elements, along a dim, that meet an input element."""
    outputs = np.arange(output_size) * stride - low_padding
    position = outputs[:, None] + np.arange(window_size) * window_dilation
    is_element = (position >= 0) & (position % input_dilation == 0)
    return int(np.sum(is_element & (position // input_dilation < input_size)))


def _window_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    return float(math.prod(result_shapes[0]) * math.prod(params["window_dimensions"]))


def _sort_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    keys = operand_shapes[0]
    length = keys[params["dimension"]]
    return math.prod(keys) * math.log2(max(length, 2)) * params.get("num_keys", 1)


def _top_k_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    return math.prod(operand_shapes[0]) * math.log2(params["k"] + 1)


def _fft_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    num_points = max(math.prod(operand_shapes[0]), math.prod(result_shapes[0]))
    return 5.0 * num_points * math.log2(max(math.prod(params["fft_lengths"]), 2))


def _integer_pow_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    num_products = max(abs(params["y"]).bit_length(), 1)
    return float(num_products * math.prod(result_shapes[0]))


def _random_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    return RANDOM_FLOPS * sum(math.prod(shape) for shape in result_shapes)


def _triangular_solve_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    return float(math.prod(result_shapes[0]) * operand_shapes[0][-1])


def _factorisation(factor: float) -> _Flops:
    """Flops of `factor` m n min(m, n) for each matrix of m by n."""

    def count(
        params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
    ) -> float:
        matrix = operand_shapes[0]
        return factor * math.prod(matrix) * min(matrix[-2:])

    return count


def _attention_flops(*, is_backward: bool) -> _Flops:
    """Of the products of `rules/attention.py`, whose operator knows its dims."""

    def count(
        params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
    ) -> float:
        return params["attention"].product_flops(operand_shapes, is_backward)

    return count


def _fused_attention_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    """Of cuDNN's kernels: two products forward, five backward, of what is not masked.

    Masked blocks are left out: keys behind a query, and those before its window.
    """
    q, v = operand_shapes[0], operand_shapes[2]
    queries, keys = (shape[2 if params["layout"] else 1] for shape in (q, v))
    by_depth, by_width = (3, 2) if len(operand_shapes) > _FORWARD_OPERANDS else (1, 1)
    num_scores = math.prod(q[:-1]) * keys
    if "CAUSAL" in params["mask_type"].name:
        num_scores *= max(1.0 - keys / (2.0 * queries), 0.5)
    window = params["sliding_window_length"]
    num_scores = min(num_scores, math.prod(q[:-1]) * (window or keys))
    return 2.0 * num_scores * (by_depth * q[-1] + by_width * v[-1])


def _pallas_flops(
    params: Params, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape]
) -> float:
    """Of the kernel's products, in each step of the grid, or as the user says."""
    whole = math.prod(params["out_avals"][0].shape)
    part = math.prod(result_shapes[0]) / max(whole, 1)
    if params["cost_estimate"] is not None:
        return part * params["cost_estimate"].flops
    grid = params["grid_mapping"].grid
    steps = math.prod(size for size in grid if isinstance(size, int))
    return part * steps * _product_flops(params["jaxpr"])


def _product_flops(jaxpr: Any) -> float:
    """Of a kernel's products, with loops by their length and the longest branch."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            shapes = [
                [v.aval.shape for v in each] for each in (eqn.invars, eqn.outvars)
            ]
            total += flops(name, params, *shapes)
        elif name == "cond":
            total += max(map(_product_flops, inner_jaxprs(eqn)))
        else:
            inner = sum(map(_product_flops, inner_jaxprs(eqn)))
            total += params.get("length", 1) * inner
    return total


_FORWARD_OPERANDS = 10  # of cuDNN's attention; backward there are three more
_PRODUCTS: Mapping[str, _Flops] = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _conv_flops,
    "autopar_attention": _attention_flops(is_backward=False),
    "autopar_attention_backward": _attention_flops(is_backward=True),
    "autopar_fused_attention": _attention_flops(is_backward=False),
    "autopar_fused_attention_backward": _attention_flops(is_backward=True),
    **dict.fromkeys(CUDNN_ATTENTION.kinds, _fused_attention_flops),
}
# Orders of magnitude, after Golub and Van Loan, Matrix Computations (4th edition).
_FACTORISATIONS: Mapping[str, _Flops] = {
    "cholesky": _factorisation(1 / 3),
    "lu": _factorisation(2 / 3),
    "geqrf": _factorisation(4 / 3),
    "qr": _factorisation(4 / 3),
    "householder_product": _factorisation(4 / 3),
    "triangular_solve": _triangular_solve_flops,
    "eigh": _factorisation(9.0),
    "eig": _factorisation(25.0),
    "svd": _factorisation(20.0),
    "schur": _factorisation(25.0),
    "hessenberg": _factorisation(10 / 3),
    "tridiagonal": _factorisation(4 / 3),
}
_OTHERS: Mapping[str, _Flops] = {
    "pallas_call": _pallas_flops,
    "reduce_window": _window_flops,
    "reduce_window_max": _window_flops,
    "reduce_window_min": _window_flops,
    "reduce_window_sum": _window_flops,
    "sort": _sort_flops,
    "top_k": _top_k_flops,
    "fft": _fft_flops,
    "integer_pow": _integer_pow_flops,
    "random_bits": _random_flops,
    "random_seed": _random_flops,
    "random_split": _random_flops,
    "random_fold_in": _random_flops,
    "threefry2x32": _random_flops,
    "rng_bit_generator": _random_flops,
}
_RATES = dict(zip(CUDNN_ATTENTION.kinds, ATTENTION_RATES, strict=True)) | {
    "autopar_fused_attention": ATTENTION_RATES[0],
    "autopar_fused_attention_backward": ATTENTION_RATES[1],
}
_FLOPS: Mapping[str, _Flops] = {**_PRODUCTS, **_FACTORISATIONS, **_OTHERS}


def total_flops(op: Operator) -> float:
    """Flops of the whole operator, on one device."""
    return flops(
        op.kind,
        op.params,
        [kind.shape for kind in op.operand_types],
        [kind.shape for kind in op.result_types],
    )
