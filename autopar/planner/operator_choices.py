"""The strategies of one kind of operator, shared by all of the kind in a problem."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..clusters.cluster import Cluster
from ..graph.op_graph import Operator, constant_key, params_key
from ..sharding.mesh import MeshShape
from .axis_orders import Orders, strategies_in_orders
from .spec_choices import SpecChoices, SpecTable
from .strategies import Strategies, enumerate_strategies, strategy_seconds


@dataclass(frozen=True, eq=False)
class OperatorChoices:
    """The strategies of one kind of operator, with what an execution takes [n]."""

    strategies: Strategies
    seconds: np.ndarray
    operands: tuple[SpecChoices, ...]
    results: tuple[SpecChoices, ...]


class OperatorTable:
    """The choices of every operator on one mesh; operators of a kind share them.

    `must_split` are the operators whose work no two devices may do twice, `orders`
    those of axes besides mesh order.
    """

    def __init__(
        self,
        mesh: MeshShape,
        cluster: Cluster,
        specs: SpecTable,
        must_split: Collection[int],
        orders: Orders = frozenset(),
    ) -> None:
        self._mesh, self._cluster, self._specs = mesh, cluster, specs
        self._must_split, self._orders = must_split, orders
        self._known: dict[object, OperatorChoices] = {}
        self._weighted: dict[tuple[int, float], np.ndarray] = {}

    def of(self, op: Operator) -> OperatorChoices:
        """The choices of one operator."""
        must_split = op.index in self._must_split
        key = (
            op.kind,
            op.operand_types,
            op.result_types,
            tuple([constant_key(o) for o in op.operands]),
            params_key(op.params),
            must_split,
        )
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._enumerate(op, must_split)
        return known

    def seconds(self, choices: OperatorChoices, weight: float) -> np.ndarray:
        """[n] seconds of `weight` executions."""
        key = id(choices), weight
        if key not in self._weighted:
            self._weighted[key] = choices.seconds * weight
        return self._weighted[key]

    def _enumerate(self, op: Operator, must_split: bool) -> OperatorChoices:
        rotating = self._cluster.overlaps and must_split
        strategies = enumerate_strategies(op, self._mesh, rotating=rotating)
        if self._orders:
            strategies = strategies_in_orders(op, strategies, self._orders)
        seconds = strategy_seconds(op, strategies, self._mesh, self._cluster)
        if must_split:
            is_split = strategies.share <= strategies.share.min() * 1.001
            seconds = np.where(is_split, seconds, np.inf)
        operands = strategies.operand_specs.swapaxes(0, 1)
        results = strategies.result_specs.swapaxes(0, 1)
        return OperatorChoices(
            strategies,
            seconds,
            tuple(self._specs.choices(specs) for specs in operands),
            tuple(self._specs.choices(specs) for specs in results),
        )
