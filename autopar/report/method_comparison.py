"""A plan beside those of every named method, on the same step, cluster and costs.

A method's plan is its cheapest; where it is above the budget, it is told what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ..methods.methods import Method
from ..methods.named_methods import DataParallel, Megatron, Zero
from ..option_values import NO_BUDGET
from ..options import Options
from ..planner.graph_plan import plan_graph
from ..planner.plan_request import PlanRequest
from ..planner.planned import Planned
from ..planner.whole_step import batch_tensors
from ..plans.explain import format_bytes, format_seconds
from ..plans.plan import ShardingPlan, TriedPlan
from ..plans.staged_plan import with_budget

MethodPlan = ShardingPlan | Exception


@dataclass(frozen=True)
class Row:
    """One method's plan, or the error that says why it has none."""

    name: str
    plan: MethodPlan


def named_methods(planned: Planned, options: Options) -> tuple[Method, ...]:
    """The methods with a name that a step can be compared with.

    A tensor-parallel group is a host's devices, or two where there is one host.
    """
    cluster = planned.cluster
    size = cluster.devices_per_host if cluster.num_hosts > 1 else 2
    batches = {
        "num_microbatches": options.num_microbatches,
        "microbatch_semantics": options.microbatch_semantics,
    }
    methods: list[Method] = [DataParallel(**batches)]
    methods += [Zero(stage, **batches) for stage in (1, 2, 3)]
    if cluster.num_devices % size == 0 and cluster.num_devices > 1:
        methods += [Megatron(size, sequence, **batches) for sequence in (False, True)]
    return tuple(methods)


def compare(
    planned: Planned,
    leaves: Sequence[Any],
    options: Options,
    on_method: Callable[[str], None] = lambda name: None,
) -> Iterator[Row]:
    """The plan's row, then one for each named method.

    Args:
      planned: the plan with its trace and graph.
      leaves: the example arguments' leaves.
      options: what it was planned with; the method is replaced.
      on_method: is told what is planned next.
    """
    yield Row("this plan", planned.plan)
    batch = batch_tensors(planned.traced, planned.graph, options)
    request = PlanRequest(planned.graph, leaves, batch, planned.cluster, options)
    budget_bytes = options.budget_on(planned.cluster)
    for method in named_methods(planned, options):
        on_method(str(method))
        name = _short(method)
        own = {"mesh": None, "pins": {}, "rules": None, "memory_budget": NO_BUDGET}
        try:
            # To read a plan of a large step takes longer than to find it.
            plan = plan_graph(request.asking(method=method, **own), is_kept=False)
        except (ValueError, NotImplementedError) as error:
            yield Row(name, error)
        else:
            yield Row(name, with_budget(plan, budget_bytes))


def tried_rows(rows: Sequence[Row]) -> Iterator[TriedPlan]:
    """The methods' plans, for advice; the first row is this plan."""
    for row in rows[1:]:
        if not isinstance(row.plan, Exception):
            yield TriedPlan(row.name, row.plan.predicted)


def comparison_table(rows: Sequence[Row]) -> Table:
    """Step time, collectives and memory of every row."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("method")
    table.add_column("mesh")
    for column in ("step", "x", "collectives", "memory", "gap"):
        table.add_column(column, justify="right", no_wrap=True)
    first = rows[0].plan
    for row in rows:
        table.add_row(row.name, *_cells(row.plan, first))
    refused = [
        f"{each.name} is refused: {_reason(each.plan)}"
        for each in rows
        if isinstance(each.plan, Exception)
    ]
    if refused:
        table.caption, table.caption_justify = Text("\n".join(refused)), "left"
    return table


def _reason(plan: MethodPlan) -> str:
    """The first sentence of why a method is refused."""
    return str(plan).split(";")[0].split(". ")[0]


def _cells(plan: MethodPlan, first: MethodPlan) -> list[str | Text]:
    if isinstance(plan, Exception):
        return ["-", "-", "", "", "refused", ""]
    assert isinstance(first, ShardingPlan)
    predicted = plan.predicted
    memory = format_bytes(predicted.peak_bytes)
    if 0 < predicted.budget_bytes < predicted.peak_bytes:
        return [str(plan.mesh), "-", "", "", f"needs {memory}", ""]
    return [
        str(plan.mesh),
        format_seconds(predicted.step_seconds),
        f"{predicted.step_seconds / first.predicted.step_seconds:.2f}",
        format_bytes(predicted.collective_bytes),
        memory,
        f"{predicted.optimality_gap:.2%}",
    ]


def _short(method: Method) -> str:
    """The method without the arguments that all have."""
    text = str(method)
    name, _, arguments = text.rstrip(")").partition("(")
    kept = [
        each
        for each in arguments.split(", ")
        if each
        and not each.startswith(("num_microbatches", "microbatch_semantics"))
        and not each.endswith(("=False", "reshard_after_forward=True"))
    ]
    return f"{name}({', '.join(kept)})"
