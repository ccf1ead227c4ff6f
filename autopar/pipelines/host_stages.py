"""Stages on a Ray cluster, where each has the same number of whole hosts.

Every such number is searched by itself (`stage_search.py`); the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from ..errors import InfeasiblePlanError
from ..methods.methods import PipelineParallel
from ..options import Options
from ..plans.parallel_plan import Plan
from .pipeline_plan import PlannedPipeline
from .stage_search import StageSearch, StageSearcher


def search_host_stages(
    call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]],
    method: PipelineParallel,
    options: Options,
    price: Callable[[PlannedPipeline], Plan],
) -> StageSearch:
    """The fastest pipeline whose submeshes are equally many whole hosts.

    Arguments are those of `search_stages`.

    Raises:
      InfeasiblePlanError: no stages fit into memory; names what takes the most.
      BatchCoupledError: the step cannot be cut into microbatches.
      ValueError: it cannot be cut into two stages, or no hosts can be dealt out so.
    """
    searcher = StageSearcher(call, method, options)
    cluster = searcher.cluster
    hosts, inside = cluster.num_hosts, cluster.devices_per_host
    whole = {n * inside for n in range(1, hosts) if hosts % n == 0}
    sizes = sorted(whole & {each.mesh.size for each in searcher.submeshes()})
    if not sizes:
        raise ValueError(
            f"On Ray a stage has whole hosts, as many as each other stage, but there "
            f"are {hosts} hosts of {inside} devices and `mesh` is {options.mesh!r}; "
            f"leave `mesh` out, ask for more with Cluster.ray(num_hosts=), or use "
            f"autopar.ShardParallel()."
        )
    best: StageSearch | None = None
    errors: list[InfeasiblePlanError] = []
    for size in sizes:
        searcher.size = size
        below_seconds = best.plan.predicted.step_seconds if best else inf
        try:
            best = searcher.run(price, below_seconds) or best
        except InfeasiblePlanError as error:
            errors.append(error)
    if best is None:
        raise min(errors, key=lambda each: each.least_budget_bytes or inf)
    return best
