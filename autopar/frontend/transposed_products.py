"""Makes products in the order of dims that their only reader transposes them to.

JAX writes the gradient of `x @ w` by `w` as `(g^T x)^T`. A `reduce_scatter` of it
splits the minor dim of the product, and so copies all of it first; `x^T g` has the same
sums without the transpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..jax_compat import CALLS, LOOPS, Literal, with_eqns, with_jaxpr, with_jaxprs


def with_transposed_products(closed: Any) -> Any:
    """The same jaxpr, without transposes that products can do by themselves.

    These exchange the free dims of the operands of a product that nothing else reads.
    What devices do on their own (shard_map, kernels) stays as it is.
    """
    return with_jaxpr(closed, _rewritten)


def _rewritten(jaxpr: Any) -> Any:
    num_reads = Counter(v for eqn in jaxpr.eqns for v in _variables(eqn.invars))
    num_reads.update(_variables(jaxpr.outvars))
    products: dict[Any, int] = {}  # positions in `eqns` by what they make
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        kind = eqn.primitive.name
        if kind in CALLS or kind in LOOPS:
            eqn = with_jaxprs(eqn, _rewritten)
        elif kind == "dot_general":
            products[eqn.outvars[0]] = len(eqns)
        elif kind == "transpose" and (read := _variables(eqn.invars)):
            position = products.get(read[0])
            if position is not None and num_reads[read[0]] == 1:
                product = eqns[position]
                if _exchanges_operands(eqn.params["permutation"], product):
                    eqns[position] = _exchanged(product, eqn.outvars)
                    products[eqn.outvars[0]] = position
                    continue
        eqns.append(eqn)
    return with_eqns(jaxpr, eqns)


def _exchanges_operands(permutation: Sequence[int], product: Any) -> bool:
    """Whether a permutation puts the right operand's free dims before the left's."""
    (contract, _), (batch, _) = product.params["dimension_numbers"]
    first, last = len(batch), len(permutation)
    middle = product.invars[0].aval.ndim - len(contract)
    moved = (*range(first), *range(middle, last), *range(first, middle))
    return tuple(permutation) == moved and _can_exchange(product.params)


def _can_exchange(params: Any) -> bool:
    """Whether all that is asked of a product is asked of its operands alike."""
    precision = params["precision"]
    return params["out_sharding"] is None and (
        precision is None or isinstance(precision, tuple)
    )


def _exchanged(product: Any, outvars: Sequence[Any]) -> Any:
    """The product with its operands exchanged, under another name."""
    params = dict(product.params)
    contract, batch = params["dimension_numbers"]
    params["dimension_numbers"] = (contract[::-1], batch[::-1])
    if params["precision"] is not None:
        params["precision"] = params["precision"][::-1]
    return product.replace(
        invars=product.invars[::-1], outvars=list(outvars), params=params
    )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
