"""A plan beside those of every named method, on the same step, cluster and costs.

A method's plan is its cheapest; where it is above the budget, it is told what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..clusters.cluster import Cluster
from ..methods.methods import Method
from ..methods.named_methods import DataParallel, Megatron, Zero
from ..option_values import NO_BUDGET
from ..options import Options
from ..planner.graph_plan import plan_graph
from ..planner.plan_request import PlanRequest
from ..planner.planned import Planned
from ..planner.reasons import Alternative
from ..planner.whole_step import batch_tensors
from ..plans.explain import format_bytes, format_seconds, table
from ..plans.plan import Prediction
from ..plans.staged_plan import with_budget


def _named_methods(cluster: Cluster, options: Options) -> dict[str, Method]:
    """The methods with a name that a step can be compared with.

    A tensor-parallel group is a host's devices, or two where there is one host.
    """
    size = cluster.devices_per_host if cluster.num_hosts > 1 else 2
    batches = {
        "num_microbatches": options.num_microbatches,
        "microbatch_semantics": options.microbatch_semantics,
    }
    methods: dict[str, Method] = {"DataParallel()": DataParallel(**batches)}
    methods |= {f"Zero(stage={i})": Zero(i, **batches) for i in (1, 2, 3)}
    if cluster.num_devices % size == 0 and cluster.num_devices > 1:
        name = f"Megatron(tensor={size}"
        methods[f"{name})"] = Megatron(size, **batches)
        methods[f"{name}, sequence=True)"] = Megatron(size, True, **batches)
    return methods


def compare(
    planned: Planned,
    leaves: Sequence[Any],
    options: Options,
) -> Iterator[Alternative]:
    """The plan itself, then that of each named method.

    Args:
      planned: the plan with its trace and graph.
      leaves: the example arguments' leaves.
      options: what it was planned with; the method is replaced.
    """
    yield Alternative.of("this plan", planned.plan)
    batch = batch_tensors(planned.traced, planned.graph, options)
    request = PlanRequest(planned.graph, leaves, batch, planned.cluster, options)
    budget_bytes = options.budget_on(planned.cluster)
    for name, method in _named_methods(planned.cluster, options).items():
        own = {"mesh": None, "pins": {}, "rules": None, "memory_budget": NO_BUDGET}
        try:
            # To read a plan of a large step takes longer than to find it.
            plan = plan_graph(request.asking(method=method, **own), is_kept=False)
        except (ValueError, NotImplementedError) as error:
            yield Alternative.refused(name, error)
        else:
            yield Alternative.of(name, with_budget(plan, budget_bytes))


def comparison_table(rows: Sequence[Alternative]) -> Table:
    """Step time, collectives and memory of every row, the first of which is a plan."""
    made = table("method", "mesh", ">step", ">x", ">collectives", ">memory", ">gap")
    assert rows[0].plan is not None
    first = rows[0].plan.predicted
    for row in rows:
        found = row.plan
        cells = ["", "", "", "refused", ""]
        cells = cells if found is None else _cells(found.predicted, first)
        made.add_row(row.title, Text(row.choice or "-"), *cells)
    refused = [
        f"{each.title} is refused: {each.refusal.split(';')[0].split('. ')[0]}"
        for each in rows
        if each.plan is None
    ]
    if refused:
        made.caption, made.caption_justify = Text("\n".join(refused)), "left"
    return made


def _cells(predicted: Prediction, first: Prediction) -> list[str]:
    memory = format_bytes(predicted.peak_bytes)
    if 0 < predicted.budget_bytes < predicted.peak_bytes:
        return ["-", "", "", f"needs {memory}", ""]
    return [
        format_seconds(predicted.step_seconds),
        f"{predicted.step_seconds / first.step_seconds:.2f}",
        format_bytes(predicted.collective_bytes),
        memory,
        f"{predicted.optimality_gap:.2%}",
    ]
