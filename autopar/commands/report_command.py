"""`autopar report`: a saved plan as one HTML file.

jax is imported inside: `autopar --help` does without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .explain_command import with_step
from .plan_command import find_cluster


def report(
    path: Annotated[Path, typer.Argument(help="A plan, as plan.save wrote it.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            help="The file to write. Default: the plan's name with the ending .html.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="The step that the plan is of, as autopar plan takes it. Memory over "
            "the step, alternatives and the audit need it.",
        ),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Example arguments of the step, if TARGET is the step itself.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A preset, or the path of a TOML file. Default: the cluster that the "
            "plan names."
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="As the plan was made with; needs --target.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An option of a model by name, such as num_layers=4; may be repeated.",
        ),
    ] = None,
    alternatives: Annotated[
        bool, typer.Option(help="Plan the named methods too; needs --target.")
    ] = True,
    audit: Annotated[
        bool,
        typer.Option(help="Compile the step, if its devices are here; needs --target."),
    ] = True,
) -> None:
    """Write a saved plan as one HTML file, which opens without a network.

    Example:

    \b
        autopar report plan.json --out plan.html
        autopar report plan.json --target train:for_autopar
    """
    from ..plans.parallel_plan import Plan
    from .plan_targets import find_step, parse_settings

    plan = Plan.load(path)
    if target is not None:
        found = find_step(target, args, parse_settings(settings or []))
        plan = with_step(plan, found, find_cluster(cluster), microbatches)
    elif settings or (args, cluster, microbatches) != (None, None, None):
        raise ValueError(
            "--args, --set, --cluster and --microbatches say more about the step, so "
            "--target must name it; give --target MODULE:NAME, or leave them out."
        )
    written = output or path.with_suffix(".html")
    plan.report(written, alternatives=alternatives, audit=audit)
    print(f"written to {written}")
