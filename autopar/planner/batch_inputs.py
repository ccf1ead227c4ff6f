"""Which arguments that are no state are the batch, by what is done with them.

Where leading sizes differ, losses are summed over examples: the batch is what reaches a
loss (or a result for each example) with its examples apart, and products on the way. A
data set that indices are taken from, times of a solver, or edges of a graph do not.
What shares a size with a batch may still be a frozen model (beam search, sampling over
a cache): its dim is summed over in products with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from textwrap import shorten
from weakref import WeakKeyDictionary

import jax.numpy as jnp

from ..frontend.roles import batch_leaves, leading_sizes, untied_arrays
from ..graph.build_graph import build_graph, tensor_type
from ..graph.op_graph import Operand, OpGraph, TensorType
from ..graph.traced_function import Roles, TracedFunction
from ..microbatches.example_flow import ExampleFlow
from ..microbatches.microbatches import BatchCoupledError, exact_step


def batch_by_use(traced: TracedFunction, roles: Roles) -> Roles:
    """`roles` with the batch that the uses of arguments tell.

    The graph is built only where sizes differ or an argument has several matrices.
    """
    known = _KNOWN.setdefault(traced, {})
    if roles not in known:
        known[roles] = _found(traced, roles)
    return known[roles]


# A step is asked for its roles where it is planned, and wherever it is cut.
_KNOWN: WeakKeyDictionary[TracedFunction, dict[Roles, Roles]] = WeakKeyDictionary()


def _found(traced: TracedFunction, roles: Roles) -> Roles:
    search = _Search(traced, roles)
    arguments = untied_arrays(roles, traced.in_tree, search.types)
    notes = list[str]()
    is_by_use = False
    while sizes := leading_sizes(arguments, search.types):
        chosen, notes = sizes[:1], []
        if is_by_use and len(sizes) > 1:
            chosen, notes = search.by_use(sizes, sum(arguments, []))
        batch = batch_leaves(arguments, search.types, chosen)
        frozen = [own for own in arguments if search.is_frozen(own, batch)]
        if frozen:
            arguments = [own for own in arguments if own not in frozen]
        elif is_by_use or len(sizes) == 1:
            return roles.with_batch(batch, notes)
        else:
            is_by_use = True  # frozen models are put aside first
    return roles.with_batch(())


@dataclass(frozen=True)
class _Group:
    """Leaves that may be the batch, and what becomes of their examples.

    The greatest `key` is the likeliest: 0 for weights and 2 if examples share products;
    whether a loss is of them; whether a microbatch needs no other; flops shared.
    """

    leaves: tuple[int, ...]
    key: tuple[int, bool, bool, float]


@dataclass(frozen=True, eq=False)
class _Search:
    traced: TracedFunction
    roles: Roles

    @cached_property
    def types(self) -> list[TensorType]:
        return [tensor_type(var.aval) for var in self.traced.jaxpr.jaxpr.invars]

    @cached_property
    def graph(self) -> OpGraph:
        return build_graph(self.traced, self.roles)

    def tensors(self, leaves: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.graph.inputs[leaf].tensor for leaf in leaves)

    def is_frozen(self, argument: Sequence[int], batch: set[int]) -> bool:
        """Whether an argument with several matrices in the batch holds weights."""
        matrices = self._matrices([leaf for leaf in argument if leaf in batch])
        return len(matrices) > 1 and self._are_weights(matrices)

    def _matrices(self, leaves: Sequence[int]) -> list[int]:
        kinds = [(leaf, self.types[leaf]) for leaf in leaves]
        return [
            leaf
            for leaf, kind in kinds
            if kind.rank > 1 and jnp.issubdtype(kind.dtype, jnp.inexact)
        ]

    def _are_weights(self, matrices: Sequence[int]) -> bool:
        tensors = self.tensors(matrices)
        return ExampleFlow.of(self.graph, tensors).is_of_weights(tensors)

    def by_use(
        self, sizes: Sequence[int], leaves: Sequence[int]
    ) -> tuple[list[int], list[str]]:
        """The sizes of the batch, and what a user should know where it is a tie.

        Of equal ones the first of `sizes` is taken. Others are of the batch, too, where
        both can be cut together and examples share more products so.
        """
        groups = [
            self._group([leaf for leaf in leaves if self.types[leaf].shape[0] == size])
            for size in sizes
        ]
        best, *others = sorted(groups, key=lambda each: each.key, reverse=True)
        chosen, tied = best, list[int]()
        for other in others:
            joined = self._joined(chosen, other)
            chosen = joined or chosen
            if joined is None and other.key[:3] == best.key[:3]:
                tied.extend(other.leaves)
        notes = []
        if tied:
            names = [
                shorten(", ".join(self.traced.input_paths[i] for i in found), 100)
                for found in (chosen.leaves, tied)
            ]
            notes.append(
                f"The batch of {self.traced.name} is taken to be {names[0]}, but from "
                f"what is done with it, it may be {names[1]}; if so, name it with "
                f"`batch_argnums`."
            )
        return sorted({self.types[leaf].shape[0] for leaf in chosen.leaves}), notes

    def _group(self, leaves: Sequence[int]) -> _Group:
        matrices = self._matrices(leaves)
        if matrices and self._are_weights(matrices):
            return _Group(tuple(leaves), (0, False, False, 0.0))
        tensors = self.tensors(leaves)
        flow = ExampleFlow.of(self.graph, tensors)
        flops = flow.heavy_flops()
        use = 0 if flow.is_of_weights(tensors) else 1 + (flops > 0)
        is_apart = use == 2 and self._is_apart(tensors)
        return _Group(
            tuple(leaves), (use, flow.reaches(self._results), is_apart, flops)
        )

    def _joined(self, chosen: _Group, other: _Group) -> _Group | None:
        """Both as one batch, where that is cut as well."""
        leaves = (*chosen.leaves, *other.leaves)
        sizes = [self.types[leaf].shape[0] for leaf in leaves]
        if not other.key[0] or gcd(*sizes) == 1:
            return None
        tensors = self.tensors(leaves)
        flops = ExampleFlow.of(self.graph, tensors).heavy_flops()
        if flops <= chosen.key[3]:
            return None
        is_apart = self._is_apart(tensors)
        if not is_apart and (chosen.key[2] or not other.key[1]):
            return None
        return _Group(leaves, (2, True, is_apart, flops))

    def _is_apart(self, tensors: Sequence[int]) -> bool:
        """Whether microbatches of these inputs do products that need no others."""
        try:
            exact_step(self.graph, tensors, 1)
        except BatchCoupledError:
            return False
        return True

    @cached_property
    def _results(self) -> list[Operand]:
        """Losses and predictions: what is returned and is no next value of state."""
        tied = set(self.roles.next_output)
        outputs = enumerate(self.graph.outputs)
        return [operand for i, operand in outputs if i not in tied]
