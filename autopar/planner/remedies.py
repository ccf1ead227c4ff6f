"""What to ask for where nothing fits: a remat, microbatches and offload that do.

Each combination has a bound from its graph alone (`even_share.py`), so few are planned:
the one that does the least more work comes first. Those planned are so without a
search, as the cheapest plan of all and as ZeRO-3. Where the options that are named are
given, the search meets these plans, too, so there will be one that fits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..clusters.cluster import Cluster
from ..costs.memory import workspace_bytes
from ..graph.op_graph import OpGraph
from ..methods.gather_again import gathering_again
from ..methods.methods import Auto, ShardParallel
from ..methods.named_methods import Zero, gathers_again, restriction_of
from ..microbatches.microbatches import BatchCoupledError, batch_size_of
from ..option_values import Offload, Remat
from ..options import Options
from ..plans.explain import format_bytes
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape, parse_mesh
from .divided_work import dividing_first
from .even_share import even_share_bytes
from .intra_op import plan_intra_op
from .mesh_search import TIGHT_GAP
from .mesh_shapes import mesh_shapes
from .step_variants import StepVariant, StepVariants
from .whole_step import TracedWhole, batch_tensors, in_microbatches

MOST_PLANNED = 3
LIKELY = 0.85  # of the budget, of what an even share of a plan that fits is less
_log = logging.getLogger("autopar")


@dataclass(frozen=True)
class Remedy:
    """Options with which a plan was found, and what it holds on one device.

    Prints as Python takes them and as the command line does.
    """

    remat: str | None
    num_microbatches: int
    offload: Offload | None
    mesh: MeshShape
    peak_bytes: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `autopar.parallelize`."""
        given = {
            "remat": self.remat,
            "num_microbatches": None
            if self.num_microbatches == 1
            else self.num_microbatches,
            "offload": self.offload,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def flags(self) -> str:
        """Those of `autopar plan`."""
        words = {"num_microbatches": "microbatches"}
        own = self.arguments.items()
        return " ".join(f"--{words.get(name, name)} {value}" for name, value in own)

    def __str__(self) -> str:
        own = self.arguments.items()
        python = ", ".join(f"{name}={value!r}" for name, value in own)
        held = format_bytes(self.peak_bytes)
        return (
            f"With {python} ({self.flags}) a plan holds {held} a device on the mesh "
            f"{self.mesh}."
        )


def suggestion(whole: TracedWhole, options: Options) -> str:
    """What to ask for instead of the options with which nothing fits, if it is found.

    A remat or offload that `options` name is kept, but for "auto". Nothing is looked
    for where microbatches, pins, rules or a method leave little free.
    """
    if not _is_free(options):
        return ""
    found = _Remedies(whole, options).first()
    if found is None:
        return "No remat, microbatches and offload were found with which a plan fits."
    return str(found)


def _is_free(options: Options) -> bool:
    is_open = isinstance(options.method, Auto | ShardParallel) and not options.rules
    is_asked = options.pins or options.like or options.num_microbatches > 1
    return is_open and not is_asked


class _Remedies:
    def __init__(self, whole: TracedWhole, options: Options) -> None:
        self.whole, self.options = whole, options
        self.traced, self.graph = whole.traced, whole.graph
        self.cluster = options.cluster or Cluster.local()
        self.budget_bytes = options.budget_on(self.cluster)
        self.cut: dict[int, StepVariants] = {}
        self.shares: dict[tuple[Offload | None, str | None, int], int] = {}

    def first(self) -> Remedy | None:
        """The first candidate of which a plan fits."""
        for number, candidate in enumerate(self.candidates()):
            if number == MOST_PLANNED:
                break
            found = self.planned(candidate)
            if found is not None:
                return found
        return None

    def candidates(self) -> Iterator[Remedy]:
        """Those with an even share within the budget, in the order of their work."""
        given = self.options.offload
        asked: list[Offload | None] = [None if given == "auto" else given]
        if asked[0] is None and self.variants(1).offloadable:
            asked.append("optimizer_state")
        for offload in asked:
            for level in self.levels():
                for number in self.fewest(offload, level):
                    found = Remedy(level, number, offload, self.mesh())
                    if found.arguments:
                        yield found

    def levels(self) -> Sequence[str | None]:
        given = self.options.remat
        return (None, "full") if given in (None, "auto") else (given,)

    def fewest(self, offload: Offload | None, level: str | None) -> Iterator[int]:
        """The least number of microbatches that may do, then twice as many."""
        numbers = self.numbers()
        if not numbers or not self.may_fit(offload, level, numbers[-1]):
            return
        low, high = 0, len(numbers) - 1
        while low < high:
            middle = (low + high) // 2
            if self.may_fit(offload, level, numbers[middle]):
                high = middle
            else:
                low = middle + 1
        yield from numbers[high : high + 2]

    def numbers(self) -> list[int]:
        """Powers of two that leave an example a device, where there are as many."""
        batch = batch_tensors(self.traced, self.graph, self.options)
        if not batch:
            return [1]
        try:
            size = batch_size_of(self.graph, batch, 1)
        except ValueError:
            return [1]
        found = [1]
        while size % (2 * found[-1]) == 0:
            found.append(2 * found[-1])
        devices = self.cluster.num_devices
        found = [each for each in found if size // each >= devices] or [1]
        try:
            self.variants(found[-1])
        except BatchCoupledError as error:
            _log.info("%s: %s", self.graph.name, error)
            return [1]
        return found

    def may_fit(self, offload: Offload | None, level: str | None, number: int) -> bool:
        """Whether an even share of a variant is within the budget."""
        key = offload, level, number
        if key not in self.shares:
            variant = self.variant(*key)
            if level and not variant.num_segments:
                return False  # there is nothing to make again
            graph = variant.graph
            devices = self.cluster.num_devices
            self.shares[key] = even_share_bytes(graph, devices)
            _log.info(
                "%s: at least %s a device with remat=%r, num_microbatches=%d, "
                "offload=%r",
                *(graph.name, format_bytes(self.shares[key])),
                *(level and str(level), number, offload and str(offload)),
            )
        workspace = workspace_bytes(self.graph, self.cluster.device.kind)
        return self.shares[key] <= LIKELY * (self.budget_bytes - workspace)

    def variant(
        self, offload: Offload | None, level: str | None, number: int
    ) -> StepVariant:
        variants = self.variants(number)
        remat = Remat.parse(level) if level else None
        return variants.make(remat, variants.asked_for(offload))

    def variants(self, number: int) -> StepVariants:
        """Those of the step in a number of microbatches."""
        if number not in self.cut:
            some = replace(self.options, num_microbatches=number)
            traced, graph = in_microbatches(self.whole, some)
            batch = batch_tensors(traced, graph, some)
            roles = self.whole.roles
            self.cut[number] = StepVariants(traced, graph, roles, batch)
        return self.cut[number]

    def mesh(self) -> MeshShape:
        """The mesh that is named, or the first that divides the step best."""
        if self.options.mesh is not None:
            return parse_mesh(self.options.mesh, self.cluster.num_devices)
        return dividing_first(self.graph, mesh_shapes(self.cluster))[0]

    def planned(self, candidate: Remedy) -> Remedy | None:
        """The candidate, with what a plan of it holds, if one fits."""
        own = candidate.offload, candidate.remat, candidate.num_microbatches
        graph, batch = self.variant(*own).graph, self.variants(own[2]).batch
        for plan in _plans(graph, candidate.mesh, self.cluster, batch):
            held = plan.predicted.peak_bytes
            _log.info(
                "%s: with offload=%r, remat=%r, num_microbatches=%d a plan holds %s",
                *(graph.name, *own, format_bytes(held)),
            )
            if held <= self.budget_bytes:
                return replace(candidate, peak_bytes=held)
        return None


def _plans(
    graph: OpGraph, mesh: MeshShape, cluster: Cluster, batch: Sequence[int]
) -> Iterator[ShardingPlan]:
    """Those of ZeRO-3, which hold little as a rule, and the cheapest plan."""
    for method in (Zero(3), Zero(3, reshard_after_forward=False)):
        own = gathering_again(graph) if gathers_again(method) else graph
        try:
            limits = (restriction_of(method, own, mesh, batch),)
            found = plan_intra_op(
                own, mesh, cluster, restrictions=limits, gap=TIGHT_GAP
            )
        except (ValueError, NotImplementedError) as error:
            _log.info("%s: %s", method, error)
        else:
            yield found.plan
    yield plan_intra_op(graph, mesh, cluster, gap=TIGHT_GAP).plan
