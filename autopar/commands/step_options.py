"""Options of the command line that several commands take, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanFile = Annotated[Path, typer.Argument(help="A plan, as plan.save wrote it.")]
Args = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="MODULE:NAME",
        help="Example arguments of the step: a tuple, or a function that returns one. "
        "TARGET is then the step itself.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="An option of a model by name, such as num_layers=4; may be repeated.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="A preset such as 8x8xH100 (hosts x devices x kind), or the path of a "
        "TOML file. Default: that of the plan, if there is one, or the devices here.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="BYTES",
        help="Memory that a device may fill, such as 70GiB.",
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", help="Parts of the batch that run one by one."),
]
Remat = Annotated[
    str | None,
    typer.Option(
        "--remat",
        help="What the backward pass makes again: selective, cheap, full, or auto: "
        "what the budget takes.",
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="fused: attention is one kernel, which keeps no scores in memory.",
    ),
]
Operators = Annotated[
    bool,
    typer.Option("--operators", help="List every operator, not only heavy ones."),
]
StepOfPlan = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="The step that the plan is of, as autopar plan takes it: what takes its "
        "trace, such as runners-up, memory over the step and the audit, is found then.",
    ),
]
