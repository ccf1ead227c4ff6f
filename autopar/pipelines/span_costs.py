"""What spans of layers cost on submeshes, from few layers that were planned.

Spans add their layers up: costs are affine in the number of equal layers. A layer of a
kind (`layers.py`, `layer_samples.py`) is planned on a submesh for one number of
microbatches, when it is asked for. Until then its cost is what it takes ideally, every
device doing an equal part and nothing sent, and what is known to come on top:

  more microbatches  what plans of fewer take beyond the ideal in a step: what is sent
                     is the same or more, and who may split a smaller batch may split a
                     larger one
  state split        what it takes without, as it only forbids plans
  fewer microbatches a part of what plans of more take, as if all were paid for each,
                     but for sums that the update adds up: these are paid once a step
  another kind       as much of the ideal as the kind that most layers are of, there

The last two are estimates, the others bounds in the model of costs, so what is not
looked at is not worth it; what the best stages use is planned in the end. Layout rules
forbid other plans on each mesh, so under them all are estimates.

All this holds for a microbatch *with its part of the sums* that the update adds up, of
which the planner finds the least: t + R / M of M microbatches. How much of it is R is
up to the plan, so a guess has all of it in t, and no sums in the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from autopar.solver.stage_problem import StageChoice

from ..clusters.cluster import Cluster
from .layer_samples import LayerCost, LayerSamples, Submesh, part_of_whole
from .layers import Layers

_ROUNDING = 1e-9  # of equal submeshes, the one that was planned


_Choice = tuple[tuple[LayerCost, ...], StageChoice]  # costs by kind


@dataclass
class SpanCosts:
    """Costs of all spans of layers on submeshes; layers are planned by `look_at`.

    `known` are those of planned layers, by submesh, number of microbatches and kind.
    """

    layers: Layers
    cluster: Cluster
    samples: LayerSamples
    known: dict[tuple[Submesh, int, int], LayerCost] = field(default_factory=dict)
    choices: dict[tuple[Submesh, int], _Choice] = field(default_factory=dict)
    refused: list[ValueError] = field(default_factory=list)
    ideals: dict[tuple[Submesh, int, int], LayerCost] = field(default_factory=dict)
    by_kind: dict[tuple[Submesh, int], tuple[LayerCost, ...]] = field(
        default_factory=dict
    )

    @cached_property
    def main_kind(self) -> int:
        """The kind that most layers are of."""
        return Counter(self.layers.kinds).most_common(1)[0][0]

    def is_known(self, submesh: Submesh, number: int, kind: int) -> bool:
        """Whether a layer of this kind was planned there."""
        return (submesh, number, kind) in self.known

    def look_at(self, submesh: Submesh, number: int, kind: int) -> None:
        """Plan a layer of a kind on a submesh, of one of `number` microbatches.

        What layout rules refuse there, as an axis does not divide a dim, cannot be.
        """
        sample = self.samples.of(number)[kind]
        try:
            cost = sample.cost(submesh, number, submesh.cluster(self.cluster))
        except ValueError as error:
            if self.samples.options.rules is None:
                raise
            self.refused.append(error)
            cost = replace(self.ideal(submesh, number, kind), seconds=inf)
        self.known[submesh, number, kind] = cost
        self.by_kind.clear()

    def cost(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        """Of one layer, planned or not, in one of `number` microbatches."""
        return self._by_kind(submesh, number)[kind]

    def _by_kind(self, submesh: Submesh, number: int) -> tuple[LayerCost, ...]:
        """Costs of a layer of each kind."""
        key = submesh, number
        if key not in self.by_kind:
            over = self._overhead(*key)
            self.by_kind[key] = tuple(
                self.known.get((*key, kind)) or self._guessed(*key, kind, over)
                for kind in range(max(self.layers.kinds) + 1)
            )
        return self.by_kind[key]

    def _guessed(
        self, submesh: Submesh, number: int, kind: int, over: LayerCost
    ) -> LayerCost:
        ideal = self.ideal(submesh, number, kind)
        return LayerCost(
            ideal.seconds * over.seconds * (1 + _ROUNDING),
            ideal.once_seconds,
            ideal.state_bytes * over.state_bytes,
            ideal.gradient_bytes * over.gradient_bytes,
            ideal.microbatch_bytes * over.microbatch_bytes,
            over.working_bytes,
        )

    def ideal(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        """Of one layer that is shared out evenly."""
        key = submesh, number, kind
        if key not in self.ideals:
            sample = self.samples.of(number)[kind]
            cluster = submesh.cluster(self.cluster)
            self.ideals[key] = sample.ideal(submesh.mesh.size, number, cluster)
        return self.ideals[key]

    def _overhead(self, submesh: Submesh, number: int) -> LayerCost:
        """Factors over the ideal, but for working bytes, which are bytes.

        Of the main kind, as planned there: of seconds the most that any number of
        microbatches says, of bytes what the nearest does.
        """
        main = self.main_kind
        plain = LayerCost(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
        if submesh.is_split:
            found = self._overhead(replace(submesh, is_split=False), number)
            plain = replace(found, state_bytes=1.0, gradient_bytes=1.0)
        seen = [
            each
            for (where, each, kind), cost in self.known.items()
            if (where, kind) == (submesh, main) and cost.seconds < inf
        ]
        if not seen:
            return plain
        ideal = self.ideal(submesh, number, main).seconds
        excess = max(self._excess(submesh, number, each) for each in seen)
        nearest = min(seen, key=lambda n: (max(n / number, number / n), n))
        cost = self.known[submesh, nearest, main]
        least = self.ideal(submesh, nearest, main)
        return LayerCost(
            max(1 + excess / ideal, plain.seconds),
            1.0,
            part_of_whole(cost.state_bytes, least.state_bytes),
            part_of_whole(cost.gradient_bytes, least.gradient_bytes),
            part_of_whole(cost.microbatch_bytes, least.microbatch_bytes),
            cost.working_bytes * nearest / number,
        )

    def _excess(self, submesh: Submesh, number: int, seen: int) -> float:
        """Seconds beyond the ideal that a layer of the main kind takes at the least, by
        its plan for a `seen` number of microbatches; see the top of the file."""
        cost = self.known[submesh, seen, self.main_kind]
        ideal = self.ideal(submesh, seen, self.main_kind).seconds
        beyond = max(cost.seconds - ideal, 0.0)
        if number >= seen:
            return (seen * beyond + cost.reducing_seconds) / number
        part = self.ideal(submesh, number, self.main_kind).seconds / ideal
        return part * number / seen * beyond + cost.reducing_seconds / number

    def choice(self, submesh: Submesh, number: int) -> StageChoice:
        """The submesh as the solver sees it; the same object while costs are alike."""
        costs = self._by_kind(submesh, number)
        known = self.choices.get((submesh, number))
        if known is None or known[0] != costs:
            known = costs, self._choice(submesh, costs)
            self.choices[submesh, number] = known
        return known[1]

    def _choice(self, submesh: Submesh, costs: Sequence[LayerCost]) -> StageChoice:
        working = np.array([each.working_bytes for each in costs])[:, None, None]
        label: Hashable = submesh
        return StageChoice(
            label,
            submesh.mesh.size,
            self._summed([c.seconds for c in costs]),
            self._summed([c.once_seconds for c in costs]),
            self._summed([c.state_bytes + c.gradient_bytes for c in costs])
            + np.where(self._counts > 0, working, 0.0).max(axis=0),
            self._summed([c.microbatch_bytes for c in costs]),
            submesh.part,
        )

    def _summed(self, by_kind: Sequence[float]) -> np.ndarray:
        """[L + 1, L + 1] sums over the layers of each span."""
        if inf not in by_kind:
            return np.tensordot(by_kind, self._counts, 1)
        finite = [0.0 if each == inf else each for each in by_kind]
        cannot_be = self._counts[np.isinf(by_kind)].any(axis=0)
        return np.where(cannot_be, inf, self._summed(finite))

    @cached_property
    def _counts(self) -> np.ndarray:
        """[kinds, L + 1, L + 1] how many layers of a kind each span has."""
        kinds = np.array(self.layers.kinds)
        is_kind = kinds == np.arange(kinds.max() + 1)[:, None]
        done = np.pad(np.cumsum(is_kind, axis=1), ((0, 0), (1, 0)))
        return np.maximum(done[:, None, :] - done[:, :, None], 0)
