"""All strategies of one operator on one mesh, as arrays: one factor per mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from math import prod
from operator import itemgetter

import numpy as np

from ..clusters.cluster import Cluster
from ..costs.compute import total_flops
from ..graph.op_graph import Operator, OpGraph, TensorType
from ..graph.work import accumulation_dtype, heavy_rows
from ..rules.base import Factor, factors_of
from ..rules.halos import has_traffic, moved_bytes
from ..sharding.mesh import MeshShape
from ..sharding.spec import REPLICATED, SUM, Spec
from .halo_costs import halo_seconds, work_seconds

SLICING = ("slice", "dynamic_slice", "gather")
# Heavy operators that together hold less than this part of all heavy flops may be
# repeated on devices; every other must be split over each axis that can split it.
REPLICABLE_FLOPS = 0.005
# From this many on, operators of equal flops are those of equal layers, and treated
# alike, so that the layers stay equal.
MANY_ALIKE = 8


@dataclass(frozen=True, eq=False)
class Strategies:
    """The legal strategies of an operator, one a row.

    `factors` are the operator's; `factor_index` is [n, axes]. Specs are [n, operands,
    axes] and [n, results, axes]. `share` [n] is the part of the work one device does.
    """

    factors: tuple[Factor, ...]
    factor_index: np.ndarray
    operand_specs: np.ndarray
    result_specs: np.ndarray
    share: np.ndarray

    def __len__(self) -> int:
        return len(self.share)

    @property
    def has_halos(self) -> np.ndarray:
        """[n] whether shards exchange anything while the operator runs."""
        shared = np.array([bool(f.halos) for f in self.factors])
        return np.asarray(shared[self.factor_index].any(axis=1))

    def chosen(self, row: int) -> tuple[Factor, ...]:
        """The factor of each mesh axis under strategy `row`."""
        return tuple(self.factors[i] for i in self.factor_index[row])


def enumerate_strategies(op: Operator, mesh: MeshShape) -> Strategies:
    """Every way to give each mesh axis a factor that divides."""
    factors = factors_of(op)
    rows = combinations(len(factors), mesh.num_axes)
    parts = parts_by_axes(mesh.axis_sizes).tolist()
    axes = [axes_in(rows, index) for index in range(len(factors))]
    legal = np.ones(len(rows), bool)
    for factor, own in zip(factors, axes, strict=True):
        if factor.size:
            legal &= np.array([factor.admits(each) for each in parts])[own]
        for other, theirs in zip(factors, axes, strict=True):
            if factor.excludes and other.name == factor.excludes:
                legal &= (own == 0) | (theirs == 0)
    kinds = (*op.operand_types, *op.result_types)
    states = np.array([(*f.operands, *f.results) for f in factors], int)
    specs = states.reshape(len(factors), -1)[rows].transpose(0, 2, 1)
    for position, kind in enumerate(kinds):
        legal &= legal_rows(kind, specs[:, position], mesh)
    rows, specs, operands = rows[legal], specs[legal], len(op.operands)
    splits = np.array([factor.splits for factor in factors])
    share = 1.0 / np.where(splits[rows], mesh.axis_sizes, 1).prod(axis=1)
    return Strategies(factors, rows, specs[:, :operands], specs[:, operands:], share)


def legal_rows(kind: TensorType, specs: np.ndarray, mesh: MeshShape) -> np.ndarray:
    """Which of `specs` [n, axes] split every dim of a tensor evenly: bool [n]."""
    legal, parts = np.ones(len(specs), bool), parts_by_axes(mesh.axis_sizes)
    for dim, size in enumerate(kind.shape):
        fits = (size % parts == 0) & ((parts == 1) | (size > 0))
        legal &= fits[axes_in(specs, dim)]
    return legal


def axes_in(rows: np.ndarray, state: int) -> np.ndarray:
    """[n] the set of axes that `rows` [n, axes] have in a state: bit a is axis a."""
    return np.asarray((rows == state) @ (1 << np.arange(rows.shape[1])))


@lru_cache(maxsize=64)
def parts_by_axes(sizes: tuple[int, ...]) -> np.ndarray:
    """[sets of axes] the number of shards along them, sets as `axes_in` tells them."""
    return np.array([prod(each) for each in product(*((1, n) for n in sizes[::-1]))])


@lru_cache(maxsize=64)
def combinations(count: int, num_axes: int) -> np.ndarray:
    """[n, axes] each way to give one of `count` things to every axis."""
    return np.array(list(product(range(count), repeat=num_axes)))


def tensor_specs(
    kind: TensorType, mesh: MeshShape, *, pending: bool
) -> tuple[Spec, ...]:
    """Every spec a tensor may have, pending sums included if asked for."""
    states = [REPLICATED]
    if not kind.is_extended:
        states.extend(range(kind.rank))
        if pending and np.issubdtype(accumulation_dtype(kind), np.inexact):
            states.append(SUM)
    specs = np.array(states)[combinations(len(states), mesh.num_axes)]
    return tuple(map(tuple, specs[legal_rows(kind, specs, mesh)].tolist()))


def shard_fractions(specs: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The part of a tensor that one device holds under `specs` [n, axes]: [n]."""
    return 1.0 / np.where(specs >= 0, np.array(sizes), 1).prod(axis=1)


def strategy_seconds(
    op: Operator, strategies: Strategies, mesh: MeshShape, cluster: Cluster
) -> np.ndarray:
    """Seconds of one execution under each strategy: [n]."""
    moved, sizes = np.zeros(len(strategies)), mesh.axis_sizes
    specs = np.append(strategies.operand_specs, strategies.result_specs, axis=1)
    for position, kind in enumerate((*op.operand_types, *op.result_types)):
        if position or op.kind not in SLICING:  # else only what is taken out is read
            moved += kind.bytes * shard_fractions(specs[:, position], sizes)
    sent = np.zeros(len(strategies))
    own = has_traffic(op)
    for row in np.flatnonzero(strategies.has_halos | own).tolist():
        chosen = strategies.chosen(row)
        moved[row] += moved_bytes(op, chosen, sizes)
        sent[row] = halo_seconds(op, chosen, mesh, cluster)
    done = (total_flops(op) * strategies.share).tolist()
    work = list(zip(done, moved.tolist(), strict=True))
    if own:
        rows = map(strategies.chosen, range(len(work)))
        pairs = zip(rows, work, strict=True)
        seconds = np.array([work_seconds(op, *w, sizes, cluster) for w in pairs])
    else:
        known = {each: work_seconds(op, (), each, sizes, cluster) for each in set(work)}
        seconds = np.array([known[each] for each in work])
    return sent + seconds


def operators_to_split(graph: OpGraph) -> set[int]:
    """Heavy operators but the smallest kinds, under REPLICABLE_FLOPS together."""
    columns = graph.columns
    rows = heavy_rows(columns)
    weights = np.array([block.weight for block in graph.blocks])
    flops = {k: total_flops(columns.distinct[k]) for k in {*columns.alike[rows]}}
    each = np.array([flops[k] for k in columns.alike[rows]])
    amounts = each * weights[columns.block_of[rows]]
    heavy = zip(amounts.tolist(), columns.index[rows].tolist(), strict=True)
    heavy = sorted(heavy)
    allowed = REPLICABLE_FLOPS * sum(amount for amount, _ in heavy)
    chosen: set[int] = set()
    for amount, equal in groupby(heavy, key=itemgetter(0)):
        indices = [index for _, index in equal]
        if len(indices) >= MANY_ALIKE:
            allowed -= amount * len(indices)
            chosen.update(indices if allowed < 0 else ())
            continue
        for index in indices:
            allowed -= amount
            if allowed < 0:
                chosen.add(index)
    return chosen
