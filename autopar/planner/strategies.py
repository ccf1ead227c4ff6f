"""All strategies of one operator on one mesh, as arrays: one factor per mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product
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
    sizes = np.array(mesh.axis_sizes)
    rows = np.array(list(product(range(len(factors)), repeat=len(sizes))))
    legal = np.ones(len(rows), bool)
    for index, factor in enumerate(factors):
        if factor.size:
            used = np.where(rows == index, sizes, 1).prod(axis=1)
            admitted = [n for n in np.unique(used).tolist() if factor.admits(n)]
            legal &= np.isin(used, admitted)
        for other, each in enumerate(factors):
            if factor.excludes and each.name == factor.excludes:
                legal &= ~((rows == index).any(axis=1) & (rows == other).any(axis=1))
    operand_states = np.array([f.operands for f in factors], int).reshape(
        len(factors), len(op.operands)
    )
    result_states = np.array([f.results for f in factors], int).reshape(
        len(factors), len(op.results)
    )
    operand_specs = operand_states[rows].transpose(0, 2, 1)
    result_specs = result_states[rows].transpose(0, 2, 1)
    for types, specs in (
        (op.operand_types, operand_specs),
        (op.result_types, result_specs),
    ):
        for position, kind in enumerate(types):
            legal &= legal_rows(kind, specs[:, position], sizes)
    rows, operand_specs = rows[legal], operand_specs[legal]
    result_specs = result_specs[legal]
    splits = np.array([factor.splits for factor in factors])
    share = 1.0 / np.where(splits[rows], sizes, 1).prod(axis=1)
    return Strategies(factors, rows, operand_specs, result_specs, share)


def legal_rows(kind: TensorType, specs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which of `specs` [n, axes] split every dim of a tensor evenly: bool [n]."""
    legal = np.ones(len(specs), bool)
    for dim, size in enumerate(kind.shape):
        used = np.where(specs == dim, sizes, 1).prod(axis=1)
        legal &= (size % used == 0) & ((used == 1) | (size > 0))
    return legal


def tensor_specs(
    kind: TensorType, mesh: MeshShape, *, pending: bool
) -> tuple[Spec, ...]:
    """Every spec a tensor may have, pending sums included if asked for."""
    states = [REPLICATED]
    if not kind.is_extended:
        states.extend(range(kind.rank))
        if pending and np.issubdtype(accumulation_dtype(kind), np.inexact):
            states.append(SUM)
    specs = np.array(list(product(states, repeat=mesh.num_axes)))
    legal = legal_rows(kind, specs, np.array(mesh.axis_sizes))
    return tuple(tuple(int(state) for state in row) for row in specs[legal])


def shard_fractions(specs: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The part of a tensor that one device holds under `specs` [n, axes]: [n]."""
    return 1.0 / np.where(specs >= 0, np.array(sizes), 1).prod(axis=1)


def strategy_seconds(
    op: Operator, strategies: Strategies, mesh: MeshShape, cluster: Cluster
) -> np.ndarray:
    """Seconds of one execution under each strategy: [n]."""
    num_flops = total_flops(op)
    moved = np.zeros(len(strategies))
    for types, specs in (
        (op.operand_types, strategies.operand_specs),
        (op.result_types, strategies.result_specs),
    ):
        for position, kind in enumerate(types):
            if types is op.operand_types and op.kind in SLICING and position == 0:
                continue  # only what is taken out of it is read
            fractions = shard_fractions(specs[:, position], mesh.axis_sizes)
            moved += kind.bytes * fractions
    sent = np.zeros(len(strategies))
    own = has_traffic(op)
    for row in np.flatnonzero(strategies.has_halos | own).tolist():
        chosen = strategies.chosen(row)
        moved[row] += moved_bytes(op, chosen, mesh.axis_sizes)
        sent[row] = halo_seconds(op, chosen, mesh, cluster)
    done = (num_flops * strategies.share).tolist()
    work = list(zip(done, moved.tolist(), strict=True))
    sizes = mesh.axis_sizes
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
