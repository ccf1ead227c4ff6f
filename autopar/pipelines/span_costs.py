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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from math import inf
from typing import Any, TypeVar, cast

import numpy as np

from autopar.solver.stage_problem import StageChoice

from ..clusters.cluster import Cluster
from .layer_samples import LayerCost, LayerSamples, Submesh, part_of_whole
from .layers import Layers

_ROUNDING = 1e-9  # of equal submeshes, the one that was planned


_Method = TypeVar("_Method", bound=Callable[..., Any])
_Choice = tuple[tuple[LayerCost, ...], StageChoice]  # costs by kind


def _kept(method: _Method, store: str = "guesses") -> _Method:
    """A method whose results are kept, until another layer is planned if guesses."""

    def kept(self: SpanCosts, *args: Any) -> Any:
        known = getattr(self, store)
        key = (method.__name__, *args)
        if key not in known:
            known[key] = method(self, *args)
        return known[key]

    return cast("_Method", wraps(method)(kept))


_kept_for_good = partial(_kept, store="fixed")


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
    fixed: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    guesses: dict[tuple[Any, ...], Any] = field(default_factory=dict)

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
        self.guesses.clear()

    def cost(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        """Of one layer, planned or not, in one of `number` microbatches."""
        return self._by_kind(submesh, number)[kind]

    @_kept
    def _by_kind(self, submesh: Submesh, number: int) -> tuple[LayerCost, ...]:
        """Costs of a layer of each kind."""
        return tuple(
            self.known.get((submesh, number, kind))
            or self._guessed(submesh, number, kind)
            for kind in range(max(self.layers.kinds) + 1)
        )

    def _guessed(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        ideal = self.ideal(submesh, number, kind)
        main = self.ideal(submesh, number, self.main_kind).seconds
        over = self.overhead(submesh, number)
        excess = self.excess(submesh, number) / main
        return LayerCost(
            ideal.seconds * (1 + excess) * (1 + _ROUNDING),
            ideal.once_seconds,
            ideal.state_bytes * over.state_bytes,
            ideal.gradient_bytes * over.gradient_bytes,
            ideal.microbatch_bytes * over.microbatch_bytes,
            over.working_bytes,
        )

    @_kept_for_good
    def ideal(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        """Of one layer that is shared out evenly."""
        sample, cluster = self.samples.of(number)[kind], submesh.cluster(self.cluster)
        return sample.ideal(submesh.mesh.size, number, cluster)

    @_kept
    def excess(self, submesh: Submesh, number: int) -> float:
        """Seconds of a microbatch that a layer takes beyond the ideal at the least.

        With its part of the sums that the update adds up. A layer of the main kind;
        see the top of the file.
        """
        found = [self._own_excess(submesh, number)]
        if submesh.is_split:
            found.append(self.excess(replace(submesh, is_split=False), number))
        return max(found)

    def _own_excess(self, submesh: Submesh, number: int) -> float:
        kind, least = self.main_kind, 0.0
        for each in self.numbers_seen(submesh):
            cost = self.known[submesh, each, kind]
            ideal = self.ideal(submesh, each, kind).seconds
            beyond = cost.seconds - ideal
            summed = cost.reducing_seconds
            if number < each:
                part = self.ideal(submesh, number, kind).seconds / ideal
                found = part * number / each * beyond + summed / number
            else:
                found = (each * beyond + summed) / number
            least = max(least, found)
        return least

    @_kept
    def numbers_seen(self, submesh: Submesh) -> Sequence[int]:
        """The numbers of microbatches for which the main kind was planned there."""
        main = self.main_kind
        return sorted(
            number
            for (each, number, kind), cost in self.known.items()
            if (each, kind) == (submesh, main) and cost.seconds < inf
        )

    @_kept
    def overhead(self, submesh: Submesh, number: int) -> LayerCost:
        """Factors over the ideal of bytes, but for working bytes, which are bytes.

        Of the main kind, as planned there for the nearest number of microbatches.
        """
        kind, seen = self.main_kind, self.numbers_seen(submesh)
        plain = LayerCost(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
        if not seen and submesh.is_split:
            found = self.overhead(replace(submesh, is_split=False), number)
            kept, working = found.microbatch_bytes, found.working_bytes
            return replace(plain, microbatch_bytes=kept, working_bytes=working)
        if not seen:
            return plain
        nearest = min(seen, key=lambda n: max(n / number, number / n))
        cost = self.known[submesh, nearest, kind]
        ideal = self.ideal(submesh, nearest, kind)
        return replace(
            plain,
            state_bytes=part_of_whole(cost.state_bytes, ideal.state_bytes),
            gradient_bytes=part_of_whole(cost.gradient_bytes, ideal.gradient_bytes),
            microbatch_bytes=part_of_whole(
                cost.microbatch_bytes, ideal.microbatch_bytes
            ),
            working_bytes=cost.working_bytes * nearest / number,
        )

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
