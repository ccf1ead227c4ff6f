"""`autopar report`: a saved plan as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .explain_command import load_plan
from .step_options import (
    Args,
    ClusterOption,
    Microbatches,
    PlanFile,
    Settings,
    StepOfPlan,
)


def report(
    path: PlanFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            help="The file to write. Default: the plan's name with the ending .html.",
        ),
    ] = None,
    target: StepOfPlan = None,
    args: Args = None,
    cluster: ClusterOption = None,
    microbatches: Microbatches = None,
    settings: Settings = None,
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
    plan = load_plan(path, target, args, settings, cluster, microbatches)
    written = output or path.with_suffix(".html")
    plan.report(written, alternatives=alternatives, audit=audit)
    print(f"written to {written}")
