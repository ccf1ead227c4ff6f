"""`autopar explain` and `autopar diff`: why a plan is as it is, and what two change.

jax is imported inside: `autopar --help` does without.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .plan_command import find_cluster
from .step_options import (
    Args,
    ClusterOption,
    Microbatches,
    Operators,
    PlanFile,
    Settings,
    StepOfPlan,
)

if TYPE_CHECKING:
    from ..clusters.cluster import Cluster
    from ..steps.parallel_plan import Plan
    from .plan_targets import Target


def explain(
    path: PlanFile,
    tensor: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Say why this argument, or the result of this operator, is as it is.",
        ),
    ] = None,
    op: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Say why this operator is split as it is."),
    ] = None,
    target: StepOfPlan = None,
    args: Args = None,
    cluster: ClusterOption = None,
    microbatches: Microbatches = None,
    settings: Settings = None,
    operators: Operators = False,
) -> None:
    """Print a saved plan: what is split how, and what it costs.

    With --tensor or --op: why this one is as it is, what it is read as and copied to;
    with --target too, what held it, the best plan with another choice here, and the
    price of that by compute, communication and memory.

    Example:

    \b
        autopar explain plan.json
        autopar explain plan.json --tensor params/w
        autopar explain plan.json --tensor params/w --target train:for_autopar
    """
    plan = load_plan(path, target, args, settings, cluster, microbatches)
    plan.explain(tensor=tensor, op=op, operators=operators)


def diff(
    before: PlanFile,
    after: Annotated[Path, typer.Argument(help="Another plan.")],
) -> None:
    """Print what changes from one plan to another, and what that costs.

    Leaves are told apart by path and grouped by layer; operators and collectives by
    source line. Figures are of one step and one device.

    Example:

    \b
        autopar diff old.json new.json
    """
    from ..steps.parallel_plan import Plan

    Plan.load(before).diff(Plan.load(after)).print()


def load_plan(
    path: Path,
    target: str | None,
    args: str | None,
    settings: Sequence[str] | None,
    cluster: str | None,
    microbatches: int | None,
) -> Plan:
    """A plan that was kept, with the step that it is of if `target` names it.

    Raises:
      ValueError: more is said of the step, which is not named.
    """
    from ..steps.parallel_plan import Plan

    plan = Plan.load(path)
    if target is not None:
        from .plan_targets import find_step, parse_settings

        found = find_step(target, args, parse_settings(settings or []))
        return with_step(plan, found, find_cluster(cluster), microbatches)
    if settings or (args, cluster, microbatches) != (None, None, None):
        raise ValueError(
            "--args, --set, --cluster and --microbatches say more of the step, but "
            "--target is not given; add --target MODULE:NAME, or leave them out."
        )
    return plan


def with_step(
    plan: Plan, target: Target, cluster: Cluster | None, microbatches: int | None
) -> Plan:
    """A plan that was kept, with the step that it is of.

    Of a step that is parallelized, pins and method are those that it asks for.

    Raises:
      PlanFileError: it is of another step.
      ValueError: the plan names no preset, and no cluster is given.
    """
    from ..api import ParallelFunction, parallelize
    from ..plans.staged_plan import StagedPlan

    step, asked = target.step, None
    if isinstance(step, ParallelFunction):
        if not isinstance(plan.decision, StagedPlan):
            asked = step.plan(*target.args).source
        step = inspect.unwrap(step)
    found = parallelize(
        step,
        plan=plan,
        cluster=cluster or cluster_of_plan(plan),
        num_microbatches=microbatches,
    ).plan(*target.args)
    return found if asked is None else replace(found, source=asked)


def cluster_of_plan(plan: Plan) -> Cluster | None:
    """The cluster that a plan names; None for the devices here.

    Raises:
      ValueError: it is neither these nor a preset.
    """
    from ..clusters.cluster import Cluster, cluster_by_name

    name = plan.decision.cluster
    if name == Cluster.local().name:
        return None
    found = cluster_by_name(name)
    if found is None:
        raise ValueError(
            f"The costs of a plan are those of its cluster, but the plan is for "
            f"{name!r}, which is no preset; name its file with --cluster."
        )
    return found
