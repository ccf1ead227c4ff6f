"""`autopar compare`: a step that was sharded by hand beside its plan.

jax is imported inside: `autopar --help` does without.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .plan_command import Mesh, Method, PlanTarget, find_cluster
from .step_options import Args, Budget, ClusterOption, Remat, Settings


def compare(
    target: PlanTarget,
    other: Annotated[
        str,
        typer.Argument(
            metavar="OTHER",
            help="MODULE:NAME of the step as jax.jit was given shardings for it, or of "
            "a function without arguments that returns it.",
        ),
    ],
    args: Args = None,
    cluster: ClusterOption = None,
    mesh: Mesh = None,
    method: Method = None,
    budget: Budget = None,
    remat: Remat = None,
    settings: Settings = None,
) -> None:
    """Put a step that was sharded by hand beside its plan, compiled for one cluster.

    Bytes of collectives by kind, peak memory, and seconds where the cluster's compiler
    is installed (autopar targets add); nothing is run. TARGET is that of autopar plan.
    OTHER takes the same arguments; jax has as many virtual devices as the cluster when
    it is imported.

    Example:

    \b
        autopar compare train:for_autopar train:by_hand --cluster 1x8xH100
    """
    from ..clusters.virtual_devices import use_virtual_devices
    from .plan_targets import find_step, look_up, parse_method, parse_settings

    known = find_cluster(cluster)
    if known is not None:
        use_virtual_devices(known.num_devices)
    from ..api import ParallelFunction, parallelize
    from ..comparison import compare as compare_steps

    found = find_step(target, args, parse_settings(settings or []))
    step = found.step
    if not isinstance(step, ParallelFunction):
        step = parallelize(
            step,
            cluster=known,
            mesh=mesh,
            method=None if method is None else parse_method(method),
            memory_budget=budget,
            remat=remat,
        )
    by_hand = look_up(other)
    if not hasattr(by_hand, "lower"):
        by_hand = by_hand()
    print(compare_steps(step, by_hand, *found.args))
