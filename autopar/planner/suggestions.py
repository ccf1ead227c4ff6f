"""What to ask for where nothing fits: a remat, microbatches and offload that do.

Each combination has a bound from its graph alone (`lower_bound.py`), so few are
planned: the one that does the least more work comes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from ..clusters.cluster import Cluster
from ..costs.memory import workspace_bytes
from ..errors import InfeasiblePlanError
from ..methods.methods import Auto, ShardParallel
from ..microbatches.microbatches import BatchCoupledError, batch_size_of
from ..option_values import Offload, Remat
from ..options import Options
from ..plans.explain import format_bytes
from .lower_bound import even_share_bytes
from .mesh_shapes import mesh_shapes
from .planning import plan_traced
from .step_variants import StepVariants
from .whole_step import TracedWhole, batch_tensors, in_microbatches

MOST_PLANNED = 3
LIKELY = 0.85  # of the budget, of what an even share of a plan that fits is less
_FLAGS = {"num_microbatches": "microbatches"}


def suggestion(whole: TracedWhole, options: Options) -> str:
    """What to ask for instead of the options with which nothing fits, if it is found.

    A remat or offload that `options` name is kept, but for "auto". Nothing is looked
    for where microbatches, pins, rules or a method leave little free.
    """
    is_open = isinstance(options.method, Auto | ShardParallel) and not options.rules
    if not is_open or options.pins or options.like or options.num_microbatches > 1:
        return ""
    cluster = options.cluster or Cluster.local()
    first = options.mesh or mesh_shapes(cluster)[0]
    options = replace(options, cluster=cluster, mesh=first)
    for given in islice(_candidates(whole, options, cluster), MOST_PLANNED):
        try:
            plan = plan_traced(whole, replace(options, **given)).plan
        except InfeasiblePlanError:
            continue
        python = ", ".join(f"{name}={value!r}" for name, value in given.items())
        flags = [f"--{_FLAGS.get(name, name)} {value}" for name, value in given.items()]
        return (
            f"With {python} ({' '.join(flags)}) a plan holds "
            f"{format_bytes(plan.predicted.peak_bytes)} a device on the mesh "
            f"{plan.mesh}."
        )
    return "No remat, microbatches and offload were found with which a plan fits."


def _candidates(
    whole: TracedWhole, options: Options, cluster: Cluster
) -> Iterator[Mapping[str, Any]]:
    """Arguments of `parallelize` that may fit by an even share, the least work first.

    Of each remat and offload, the fewest microbatches, then twice as many.
    """
    workspace = workspace_bytes(whole.graph, cluster.device.kind)
    room = options.budget_on(cluster) - workspace
    most = LIKELY * room * cluster.num_devices
    cut: dict[int, StepVariants] = {}

    def variants(number: int) -> StepVariants:
        if number not in cut:
            some = replace(options, num_microbatches=number)
            traced, graph = in_microbatches(whole, some)
            batch = batch_tensors(traced, graph, some)
            cut[number] = StepVariants(traced, graph, whole.roles, batch)
        return cut[number]

    def may_fit(number: int, level: str | None, offload: Offload | None) -> bool:
        own = variants(number)
        remat = Remat.parse(level) if level else None
        variant = own.make(remat, own.asked_for(offload))
        has_any = remat is None or variant.num_segments > 0
        return has_any and even_share_bytes(variant.graph, 1) <= most

    numbers = _numbers(whole, options, cluster.num_devices)
    try:
        variants(numbers[-1])
    except BatchCoupledError:
        numbers = [1]
    offloads: list[Offload | None] = [options.offload]
    if options.offload in (None, "auto"):
        offloads = [None, "optimizer_state"] if variants(1).offloadable else [None]
    is_free = options.remat in (None, "auto")
    for offload in offloads:
        for level in (None, "full") if is_free else (options.remat,):
            own = level, offload
            first = bisect_left(numbers, True, key=lambda n, own=own: may_fit(n, *own))
            for number in numbers[first : first + 2]:
                given = {
                    "remat": level,
                    "num_microbatches": number if number > 1 else None,
                    "offload": offload,
                }
                given = {name: value for name, value in given.items() if value}
                if given:
                    yield given


def _numbers(whole: TracedWhole, options: Options, num_devices: int) -> list[int]:
    """Powers of two that leave an example a device, where there are as many."""
    try:
        batch = batch_tensors(whole.traced, whole.graph, options)
        size = batch_size_of(whole.graph, batch, 1)
    except ValueError:
        return [1]
    found = [2**n for n in range(size.bit_length()) if size % 2**n == 0]
    return [each for each in found if size // each >= num_devices] or [1]
