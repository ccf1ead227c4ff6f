"""The solver's choice beside every named method: which is predicted to be the faster.

Every model, mesh and budget: the plan that is chosen, and that of each named method on
the same graph and costs, nothing compiled. A method's plan fits if its predicted memory
is within the budget; what a method refuses is counted, with the reason. Where one that
fits is faster than the choice by more than the choice's stated gap, or fits where
nothing is chosen, the exit code is 1. Ring attention is told apart: it runs another
program, with one operator in place of those of the step, which the planner tries only
where there are more devices than examples (`autopar/planner/attention_choice.py`).

    python -m benchmarks.against_methods
    python -m benchmarks.against_methods --models gpt moe --meshes "x:8" --budgets 0.9
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.clusters.cluster import Cluster
    from autopar.graph.op_graph import OpGraph
    from autopar.methods.methods import Method
    from autopar.options import Options
    from autopar.plans.plan import Prediction
    from benchmarks.models.workload import Workload

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {}),
    "gpt": ("gpt", {}),
    "gpt, scan": ("gpt", {"scan_layers": True}),
    "gpt, scan, remat": ("gpt", {"scan_layers": True, "remat": True}),
    "bert": ("bert", {}),
    "llama": ("llama", {}),
    "t5": ("t5", {}),
    "moe": ("moe", {}),
    "vit": ("vit", {}),
    "resnet": ("resnet", {}),
    "wrn": ("resnet", {"block": "bottleneck", "width_factor": 2}),
    "unet-2d": ("unet", {}),
    "unet-3d": ("unet", {"num_dims": 3}),
    "lstm": ("lstm", {}),
}
MESHES = ("x:8", "x:2;y:4")
BUDGETS = (0.9, 0.7)
SEARCHED = "searched"  # in place of a mesh: each plan has the mesh it finds best
RING = "ring attention"
_ROUNDING = 1e-9
_SHOWN = 120  # characters of a reason


@dataclass(frozen=True)
class Named:
    """A method's plan on its own; `refused` says why it has none.

    Seconds of a step, and bytes of the fullest device, as predicted.
    """

    method: str
    seconds: float = 0.0
    peak_bytes: int = 0
    refused: str = ""

    def fits(self, budget_bytes: int | None) -> bool:
        """Whether there is a plan that takes no more memory."""
        within = budget_bytes is None or self.peak_bytes <= budget_bytes
        return not self.refused and within


@dataclass(frozen=True)
class Case:
    """The plan that is chosen within one budget, beside the named ones.

    `seconds` is None where nothing is found to fit; `budget_bytes` None without a
    budget. `gap` is the choice's stated relative distance from the bound; planning
    took `cpu_seconds`. `fraction` is that of the plan's memory without a budget.
    """

    model: str
    mesh: str
    budget_bytes: int | None
    seconds: float | None
    peak_bytes: int
    gap: float
    named: tuple[Named, ...]
    fraction: float | None = None
    cpu_seconds: float = 0.0

    @cached_property
    def fitting(self) -> tuple[Named, ...]:
        """The methods that fit, the fastest first."""
        found = [each for each in self.named if each.fits(self.budget_bytes)]
        return tuple(sorted(found, key=lambda each: each.seconds))

    @property
    def faster(self) -> tuple[Named, ...]:
        """What fits and is faster at all, if only within the gap."""
        return self._faster_than(1 - _ROUNDING)

    @property
    def violations(self) -> tuple[Named, ...]:
        """Methods that fit and are faster than the stated bound, on the same step."""
        found = self._faster_than((1 - self.gap) * (1 - _ROUNDING))
        return tuple(each for each in found if each.method != RING)

    def _faster_than(self, part: float) -> tuple[Named, ...]:
        if self.seconds is None:
            return self.fitting
        limit = self.seconds * part
        return tuple(each for each in self.fitting if each.seconds < limit)

    @property
    def ratio(self) -> float | None:
        """Seconds of the fastest method that fits, over those of the choice."""
        if self.seconds is None or not self.fitting:
            return None
        return self.fitting[0].seconds / self.seconds

    def __str__(self) -> str:
        budget = f"{self.fraction:g}" if self.fraction else "-"
        chosen = f"{1e6 * self.seconds:.2f}" if self.seconds else "nothing fits"
        best = self.fitting[0].method if self.fitting else "none fits"
        ratio = f"{self.ratio:.4f}" if self.ratio else "-"
        refused = sum(bool(each.refused) for each in self.named)
        too_large = len(self.named) - refused - len(self.fitting)
        state = "**VIOLATION**" if self.violations else ""
        if self.faster and not state:
            state = "within the gap, or a ring"
        return (
            f"| {self.model} | {self.mesh} | {budget} | {chosen} | {self.gap:.3%} | "
            f"{best} | {ratio} | {len(self.fitting)} / {too_large} / {refused} | "
            f"{self.cpu_seconds:.1f} | {state} |"
        )


HEADER = (
    "| model | mesh | budget | step us | gap | fastest method that fits | its seconds "
    "over ours | fit / too large / refused | CPU s | |\n" + "|---" * 10 + "|"
)


def cases(
    model: str,
    mesh: str,
    budgets: Sequence[float] = BUDGETS,
    cluster: Cluster | None = None,
    **options: Any,
) -> Iterator[Case]:
    """Without a budget, then within each fraction of what that plan is to hold.

    Args:
      model: a name of `MODELS`.
      mesh: axes, or `SEARCHED`.
      budgets: fractions of the predicted memory of the plan without a budget.
      cluster: where it runs; this machine's devices if left out.
      options: of the model, over those of `MODELS`.
    """
    from benchmarks.models import build

    name, own = MODELS[model]
    compared = _Compared(build(name, **own, **options), mesh, cluster)
    named = tuple(compared.named())
    free_bytes = 0
    for fraction in (None, *budgets):
        budget = None if fraction is None else int(fraction * free_bytes)
        start = process_time()
        found = compared.chosen(budget)
        spent = process_time() - start
        assert found or budget, "a plan without a budget always fits"
        numbers = (None, 0, 0.0)
        if found is not None:
            numbers = found.step_seconds, found.peak_bytes, found.optimality_gap
            free_bytes = free_bytes or found.peak_bytes
        yield Case(model, mesh, budget, *numbers, named, fraction, spent)


class _Compared:
    """One step on one mesh, traced once for the methods."""

    def __init__(self, workload: Workload, mesh: str, cluster: Cluster | None) -> None:
        from autopar.clusters.cluster import Cluster
        from autopar.frontend.tracing import trace
        from autopar.graph.build_graph import build_graph
        from autopar.planner.whole_step import roles_of
        from autopar.sharding.mesh import parse_mesh

        self.workload, self.arguments = workload, workload.abstract()
        self.cluster = cluster or Cluster.local()
        self.mesh = None if mesh == SEARCHED else mesh
        traced = trace(workload.step, self.arguments, {})
        self.graph: OpGraph = build_graph(traced, roles_of(traced))
        self.batch = [i.tensor for i in self.graph.inputs if i.role == "batch"]
        self.axes: dict[str, int] = {}
        if self.mesh is not None:
            shape = parse_mesh(self.mesh, self.cluster.num_devices)
            self.axes = dict(zip(shape.axis_names, shape.axis_sizes, strict=True))

    def chosen(self, budget_bytes: int | None) -> Prediction | None:
        """What a user gets without a method; None if nothing is found to fit."""
        from autopar.errors import InfeasiblePlanError

        try:
            return self._whole(self._options(None, budget_bytes))
        except InfeasiblePlanError:
            return None

    def named(self) -> Iterator[Named]:
        """Each method's plan without a budget, or why it has none."""
        for name, method in self._methods().items():
            try:
                found = self._of(method)
            except (ValueError, NotImplementedError) as error:
                yield Named(name, refused=str(error).split(";")[0])
            else:
                yield Named(name, found.step_seconds, found.peak_bytes)

    def _of(self, method: Method) -> Prediction:
        import jax

        from autopar.methods.methods import ShardParallel
        from autopar.planner.graph_plan import plan_graph
        from autopar.planner.plan_request import PlanRequest

        options = self._options(method, None)
        if isinstance(method, ShardParallel):  # it changes the graph
            return self._whole(options)
        leaves = jax.tree.leaves(self.arguments)
        place = self.graph, leaves, self.batch, self.cluster
        return plan_graph(PlanRequest(*place, options)).predicted

    def _whole(self, options: Options) -> Prediction:
        from autopar.planner.planning import plan_traced
        from autopar.planner.whole_step import trace_whole

        whole = trace_whole(self.workload.step, self.arguments, {}, options)
        return plan_traced(whole, options).plan.predicted

    def _options(self, method: Method | None, budget_bytes: int | None) -> Options:
        import autopar

        step = autopar.parallelize(
            self.workload.step,
            mesh=self.mesh,
            cluster=self.cluster,
            memory_budget=budget_bytes,
        )
        options = step.options
        return options if method is None else replace(options, method=method)

    def _methods(self) -> Mapping[str, Method]:
        """Every kind of parallelism with a name, by what it is called."""
        import autopar

        found: dict[str, Method] = {
            "DataParallel": autopar.DataParallel(),
            "Zero(1)": autopar.Zero(1),
            "Zero(2)": autopar.Zero(2),
            "Zero(3)": autopar.Zero(3),
            "FSDP, kept": autopar.Zero(3, reshard_after_forward=False),
            RING: autopar.ShardParallel(attention="ring"),
        }
        groups = sorted(accumulate(reversed(self.axes.values()), mul))
        for size in groups or (2, 4, self.cluster.num_devices):
            found[f"Megatron({size})"] = autopar.Megatron(size)
            found[f"Megatron({size}), sequence"] = autopar.Megatron(size, sequence=True)
        for kind, names in self._dims().items():
            layout = self._layout(kind)
            if layout:
                found[f"{kind}, {layout}"] = autopar.LayoutRules(layout, names)
        return found

    def _dims(self) -> dict[str, dict[str, str]]:
        """Names for dims of arguments by their paths, for rules of each kind."""
        second, experts = dict[str, str](), dict[str, str]()
        for each in self.graph.inputs:
            rank = self.graph.tensors[each.tensor].type.rank
            path = f"^{re.escape(each.path)}$"
            if each.role == "batch" and rank > 1:
                second[path] = " ".join(["batch", "second", *"-" * (rank - 2)])
            if "params" in each.path and "experts" in each.path and rank == 3:
                experts[path] = "experts - -"
        found = {"second": second, "experts": experts}
        return {kind: names for kind, names in found.items() if names}

    def _layout(self, kind: str) -> str:
        """The last axis splits what the kind names, all others the batch."""
        *others, last = self.axes or ("",)
        rules = [*(f"batch:{axis}" for axis in others), f"{kind}:{last}"]
        return ";".join(rules) if last else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS))
    parser.add_argument("--cluster", help="a preset with as many devices as the mesh")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    arguments = parser.parse_args()
    from autopar.cache_folder import VARIABLE
    from autopar.clusters.cluster import Cluster
    from autopar.clusters.virtual_devices import use_virtual_devices

    os.environ[VARIABLE] = "off"  # else times may be those of reading a plan
    use_virtual_devices(8)
    name = arguments.cluster
    cluster = Cluster.local() if name is None else Cluster.preset(name)
    found: list[Case] = []
    print(HEADER)
    for model in arguments.models:
        for mesh in arguments.meshes:
            for each in cases(model, mesh, arguments.budgets, cluster):
                found.append(each)
                print(each, flush=True)
                if arguments.json is not None:  # also of a run that is stopped
                    text = json.dumps([asdict(case) for case in found], indent=1)
                    arguments.json.write_text(text)
            print(f"{process_time():.0f} s, {model} on {mesh}", file=sys.stderr)
    print(summary(found))
    sys.exit(any(each.violations for each in found))


def summary(found: Sequence[Case]) -> str:
    """How often methods were faster, and what was refused for which reason."""
    within = [each for each in found if each.faster and not each.violations]
    lines = [
        f"{len(found)} cases; a named method that fits is faster than the stated bound "
        f"in {sum(bool(each.violations) for each in found)}; faster within the gap, or "
        f"as a ring, in {len(within)}."
    ]
    for case in found:
        lines += [
            f"{case.model} on {case.mesh} within {case.fraction}: {each.method} "
            f"takes {1e6 * each.seconds:.3f} us, the choice "
            f"{1e6 * (case.seconds or 0):.3f} at a gap of {case.gap:.4%}"
            for each in case.faster
        ]
    refused = Counter(
        (each.method, re.sub(r"\[.*?\]|\d+", "#", each.refused)[:_SHOWN])
        for case in found
        if case.budget_bytes is None
        for each in case.named
        if each.refused
    )
    lines += [f"{n} times {name}: {why}" for (name, why), n in refused.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
