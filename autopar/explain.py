"""Prints a plan so that a person can judge it."""

from __future__ import annotations

from .plan import ShardingPlan


def format_plan(plan: ShardingPlan, *, operators: bool = False) -> str:
    """The plan as text."""
    return f"{plan.function} on {plan.mesh}"


def print_plan(plan: ShardingPlan, *, operators: bool = False) -> None:
    """Print the plan."""
    print(format_plan(plan, operators=operators))
