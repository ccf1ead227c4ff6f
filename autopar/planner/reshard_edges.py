"""The edges between writers and readers of a tensor; equal edges share their arrays."""

from __future__ import annotations

import numpy as np

from autopar.solver.choice_graph import EdgeType

from ..costs.collectives import at_size
from ..costs.resharding import Resharder
from ..graph.op_graph import TensorType
from ..sharding.spec import is_pending
from .spec_choices import SpecChoices


class ReshardEdges:
    """Resharding costs on one mesh, worked out once for each pair of spec choices."""

    def __init__(self, resharder: Resharder) -> None:
        self._resharder = resharder
        self._costs: dict[object, np.ndarray | None] = {}
        self._by_size: dict[object, np.ndarray] = {}

    def costs(
        self,
        sources: SpecChoices,
        targets: SpecChoices,
        tensor_bytes: int,
        weight: float,
    ) -> np.ndarray | None:
        """[source specs, target specs] seconds; None where all are 0."""
        key = (id(sources), id(targets), tensor_bytes, weight)
        if key not in self._costs:
            pair = (sources.distinct, targets.distinct)
            if pair not in self._by_size:
                self._by_size[pair] = self._resharder.by_size(*pair)
            matrix = at_size(self._by_size[pair], tensor_bytes) * weight
            self._costs[key] = matrix if matrix.any() else None
        return self._costs[key]

    def owed(self, choices: SpecChoices, kind: TensorType) -> np.ndarray:
        """[choices] the least seconds for what each owes of a sum; 0 if all owe one."""
        complete = [spec for spec in choices.distinct if not is_pending(spec)]
        if len(complete) in (0, len(choices.distinct)):
            return np.zeros(len(choices.classes))
        by_size = self._resharder.by_size(choices.distinct, complete)
        return at_size(by_size, kind.bytes).min(axis=1)[choices.classes]

    def edge_type(
        self,
        sources: SpecChoices,
        targets: SpecChoices,
        tensor_bytes: int,
        weight: float,
        *,
        as_made: bool = False,
    ) -> EdgeType | None:
        """Classes and costs of an edge; `as_made`: it is read in the spec it has."""
        if as_made:
            pairs = [[s == t for t in targets.distinct] for s in sources.distinct]
            return sources.classes, targets.classes, np.where(pairs, 0.0, np.inf)
        matrix = self.costs(sources, targets, tensor_bytes, weight)
        if matrix is None:
            return None
        return sources.classes, targets.classes, matrix
