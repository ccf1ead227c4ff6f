"""What spans of layers cost on submeshes, from few layers that were planned.

Spans add their layers up: costs are affine in the number of equal layers. A layer of a
kind (`layers.py`, `layer_samples.py`) is planned on a submesh for one number of
microbatches, when it is asked for. Until then its cost is what it takes ideally, every
device doing an equal part and nothing sent, times an overhead that is known:

  another kind      the overhead of the kind that most layers are of, there
  fewer, larger     the overhead shrinks with the number of microbatches, as if all of
  microbatches      it were paid for each of them: there may be no less
  more, smaller     the overhead is the same: smaller work is not more efficient
  microbatches
  more devices      the overhead of the same mesh with a shorter axis: to share work
                    with more devices is not more efficient
  state split       the time without, with what the update takes to add up gradients,
                    as it only forbids plans

Where a plan adds gradients up for each microbatch, another might leave that to the
update and save as much as it takes there at the most; an overhead is one without that.
The last four are bounds in the model of costs, so what is not looked at is not worth
it; the first is an estimate, and does not last: what the best stages use is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.solver.stage_problem import StageChoice

from ..clusters.cluster import Cluster
from ..sharding.mesh import MeshShape
from .layer_costs import LayerCost
from .layer_samples import LayerSamples, Submesh
from .layers import Layers


@dataclass
class SpanCosts:
    """Costs of all spans of layers on submeshes; layers are planned by `look_at`."""

    layers: Layers
    cluster: Cluster
    samples: LayerSamples
    known: dict[tuple[Submesh, int, int], LayerCost] = field(default_factory=dict)
    ideals: dict[tuple[int, ...], LayerCost] = field(default_factory=dict)
    choices: dict[tuple[Submesh, int], StageChoice] = field(default_factory=dict)
    overheads: dict[tuple[Submesh, int], LayerCost] = field(default_factory=dict)
    reducing: dict[tuple[Submesh, int], float] = field(default_factory=dict)

    @cached_property
    def main_kind(self) -> int:
        """The kind that most layers are of."""
        return Counter(self.layers.kinds).most_common(1)[0][0]

    def is_known(self, submesh: Submesh, number: int, kind: int) -> bool:
        """Whether a layer of this kind was planned there."""
        return (submesh, number, kind) in self.known

    def look_at(self, submesh: Submesh, number: int, kind: int) -> None:
        """Plan a layer of a kind on a submesh, of one of `number` microbatches."""
        sample = self.samples.of(number)[kind]
        cluster = submesh.cluster(self.cluster)
        self.known[submesh, number, kind] = sample.cost(submesh, number, cluster)
        self.choices.clear()
        self.overheads.clear()

    def cost(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        """Of one layer, planned or not, in one of `number` microbatches."""
        key = submesh, number, kind
        if key in self.known:
            return self.known[key]
        ideal = self.ideal(submesh, number, kind)
        over = self.overhead(submesh, number)
        return LayerCost(
            ideal.seconds * over.seconds,
            ideal.once_seconds * over.once_seconds,
            ideal.state_bytes * over.state_bytes,
            ideal.gradient_bytes * over.gradient_bytes,
            ideal.microbatch_bytes * over.microbatch_bytes,
            over.working_bytes,
        )

    def ideal(self, submesh: Submesh, number: int, kind: int) -> LayerCost:
        """Of one layer that is shared out evenly."""
        num_devices = submesh.mesh.size
        key = num_devices, submesh.part, number, kind
        if key not in self.ideals:
            sample, cluster = self.samples.of(number)[kind], self.cluster
            cost = sample.ideal(num_devices, number, submesh.cluster(cluster))
            self.ideals[key] = cost
        return self.ideals[key]

    def most_reducing_seconds(self, submesh: Submesh, number: int, kind: int) -> float:
        """What the update takes if all sums of a layer are left to it."""
        if number == 1 or submesh.is_split:
            return 0.0
        if (submesh, kind) not in self.reducing:
            sample, cluster = self.samples.of(number)[kind], self.cluster
            found = sample.most_reducing_seconds(submesh.mesh, submesh.cluster(cluster))
            self.reducing[submesh, kind] = found
        return self.reducing[submesh, kind]

    def overhead(self, submesh: Submesh, number: int) -> LayerCost:
        """Factors over the ideal, but for working bytes, which are bytes."""
        key = submesh, number
        if key not in self.overheads:
            self.overheads[key] = self._overhead(submesh, number)
        return self.overheads[key]

    def _overhead(self, submesh: Submesh, number: int) -> LayerCost:
        own = self._own_overhead(submesh, number)
        if own is not None:
            return own
        least = [self.overhead(each, number).seconds for each in self.simpler(submesh)]
        kept, working = 1.0, 0.0
        if submesh.is_split:
            whole = replace(submesh, is_split=False)
            plain = self.overhead(whole, number)
            least.append(plain.seconds)
            kept, working = plain.microbatch_bytes, plain.working_bytes
            cost = self.known.get((whole, number, self.main_kind))
            if cost is not None:
                ideal = self.ideal(whole, number, self.main_kind)
                seconds = cost.seconds + cost.reducing_seconds / number
                least.append(seconds / ideal.seconds)
        return LayerCost(max(least, default=1.0), 1.0, 1.0, 1.0, kept, working)

    def simpler(self, submesh: Submesh) -> Iterator[Submesh]:
        """Submeshes whose overhead is no more: with a shorter axis, or cut by host.

        An axis is shorter by its least factor, but there are two devices or more.
        """
        mesh, inside = submesh.mesh, self.cluster.devices_per_host
        by_host = mesh.size // inside, inside
        if mesh.size > inside and 1 < inside and mesh.axis_sizes != by_host:
            yield replace(submesh, mesh=MeshShape(("x", "y"), by_host))
            return
        for axis, size in enumerate(mesh.axis_sizes):
            least = next((n for n in range(2, size + 1) if size % n == 0), size)
            sizes = [*mesh.axis_sizes]
            sizes[axis] //= least
            left = [n for n in sizes if n > 1]
            if mesh.size <= inside:
                left.sort(reverse=True)  # of equal links
            if left:
                shorter = MeshShape(("x", "y")[: len(left)], tuple(left))
                yield replace(submesh, mesh=shorter)

    def _own_overhead(self, submesh: Submesh, number: int) -> LayerCost | None:
        """From what is known of the main kind there, for the nearest numbers."""
        kind = self.main_kind
        seen = sorted(n for s, n, k in self.known if (s, k) == (submesh, kind))
        if not seen:
            return None
        nearest = min(seen, key=lambda n: max(n / number, number / n))
        over = self._measured(submesh, nearest)
        seconds = 1.0
        for each in seen:
            beyond = self._measured(submesh, each).seconds - 1
            seconds = max(seconds, 1 + beyond * min(1.0, number / each))
        working = over.working_bytes * nearest / number
        return replace(over, seconds=seconds, working_bytes=working)

    def _measured(self, submesh: Submesh, number: int) -> LayerCost:
        kind = self.main_kind
        cost = self.known[submesh, number, kind]
        ideal = self.ideal(submesh, number, kind)

        def factor(part: float, whole: float) -> float:
            return part / whole if whole else 1.0

        most = self.most_reducing_seconds(submesh, number, kind)
        saved = (most - cost.reducing_seconds) / number
        return LayerCost(
            max(factor(cost.seconds - saved, ideal.seconds), 1.0),
            factor(cost.once_seconds - cost.reducing_seconds, ideal.once_seconds),
            factor(cost.state_bytes, ideal.state_bytes),
            factor(cost.gradient_bytes, ideal.gradient_bytes),
            factor(cost.microbatch_bytes, ideal.microbatch_bytes),
            cost.working_bytes,
        )

    def choice(self, submesh: Submesh, number: int) -> StageChoice:
        """The submesh as the solver sees it."""
        key = submesh, number
        if key not in self.choices:
            self.choices[key] = self._choice(submesh, number)
        return self.choices[key]

    def _choice(self, submesh: Submesh, number: int) -> StageChoice:
        kinds = range(max(self.layers.kinds) + 1)
        by_kind = [self.cost(submesh, number, kind) for kind in kinds]
        costs = [by_kind[kind] for kind in self.layers.kinds]

        def summed(values: Sequence[float]) -> np.ndarray:
            done = np.concatenate([[0.0], np.cumsum(values)])
            return done[None, :] - done[:, None]

        size = len(costs) + 1
        working = np.zeros((size, size))
        for first in range(len(costs)):
            rest = [each.working_bytes for each in costs[first:]]
            working[first, first + 1 :] = np.maximum.accumulate(rest)
        label: Hashable = submesh
        return StageChoice(
            label,
            submesh.mesh.size,
            summed([c.seconds for c in costs]),
            summed([c.once_seconds for c in costs]),
            summed([c.state_bytes + c.gradient_bytes for c in costs]) + working,
            summed([c.microbatch_bytes for c in costs]),
            submesh.part,
        )
