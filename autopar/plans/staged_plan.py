"""The decision for a pipelined step: a plan for each program, and what crosses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from ..option_values import NO_BUDGET, MicrobatchSemantics
from ..sharding.mesh import MeshShape
from .plan import Prediction, ShardingPlan, TaskKind

Decision = TypeVar("Decision", "ShardingPlan", "StagedPlan")
PLACED = "placed"
"""The schedule of operators that were placed one by one."""


@dataclass(frozen=True)
class StageProgramPlan:
    """What one stage runs for tasks of one kind, and how it is split over its submesh.

    An apply task may have several programs, which run one after the other.
    """

    stage: int
    kind: TaskKind
    sharding: ShardingPlan


@dataclass(frozen=True)
class PlannedTransfer:
    """A value that goes from one stage's submesh to another's, `count` times a step.

    `bytes` are those of the whole value, each of which is sent once.
    """

    slot: str
    source: int
    target: int
    bytes: int
    count: int

    @property
    def total_bytes(self) -> int:
        """Bytes of a step."""
        return self.bytes * self.count


@dataclass(frozen=True)
class StagedPlan:
    """The decision for a pipelined step.

    `meshes` are those of the submeshes: stage s is on number s mod their number. `rows`
    are the tasks of each submesh in order, as `0F0 0F1 0B0`. `peak_bytes` are predicted
    for one device of each submesh. Of `predicted`, seconds are of a step of the whole
    pipeline, bytes of one device of the submesh that has most. `stage_products` are
    the products of each stage's forward pass, where these were chosen.
    """

    function: str
    cluster: str
    num_stages: int
    num_microbatches: int
    schedule: str
    microbatch_semantics: MicrobatchSemantics
    meshes: tuple[MeshShape, ...]
    programs: tuple[StageProgramPlan, ...]
    transfers: tuple[PlannedTransfer, ...]
    rows: tuple[str, ...]
    peak_bytes: tuple[int, ...]
    predicted: Prediction
    stage_products: tuple[int, ...] = ()

    @property
    def is_placed(self) -> bool:
        """Whether its operators were placed one by one, and not by a solver."""
        return self.schedule == PLACED

    @property
    def transfer_bytes(self) -> int:
        """Bytes that cross between submeshes in a step, in all."""
        return sum(each.total_bytes for each in self.transfers)

    def mesh(self, stage: int) -> MeshShape:
        """The mesh of a stage."""
        return self.meshes[stage % len(self.meshes)]

    def of_stage(self, stage: int) -> tuple[StageProgramPlan, ...]:
        """The programs of a stage."""
        return tuple(each for each in self.programs if each.stage == stage)

    def predicted_on(self, stage: int) -> Prediction:
        """What the submesh of a stage takes of a step, whose seconds are all of it."""
        number = len(self.meshes)
        submesh = stage % number
        return total_prediction(
            [each for each in self.programs if each.stage % number == submesh],
            number,
            self.num_microbatches,
            self.peak_bytes[submesh],
            self.predicted.step_seconds,
            self.predicted.bubble_fraction,
        )

    def times(self, program: StageProgramPlan) -> int:
        """How often a program runs in a step."""
        return 1 if program.kind == "apply" else self.num_microbatches

    def task_seconds(self, stage: int, kind: TaskKind) -> float:
        """Predicted seconds of one task, all its programs together."""
        return sum(
            each.sharding.predicted.step_seconds
            for each in self.of_stage(stage)
            if each.kind == kind
        )


def total_prediction(
    programs: Iterable[StageProgramPlan],
    num_submeshes: int,
    num_microbatches: int,
    peak_bytes: int,
    step_seconds: float,
    bubble_fraction: float,
    bound_seconds: float = 0.0,
) -> Prediction:
    """What a pipeline takes: its busiest submesh, and the whole step.

    `bound_seconds` are what no stages of a search take less than; 0 where none was
    made, so that the gap is infinite.
    """
    compute: dict[int, float] = defaultdict(float)
    collective: dict[int, float] = defaultdict(float)
    bytes_: dict[int, int] = defaultdict(int)
    moving: dict[int, float] = defaultdict(float)
    at_host: dict[int, dict[str, int]] = defaultdict(dict)
    flops = split = 0.0
    for each in programs:
        submesh, found = each.stage % num_submeshes, each.sharding.predicted
        times = 1 if each.kind == "apply" else num_microbatches
        compute[submesh] += found.compute_seconds * times
        collective[submesh] += found.collective_seconds * times
        bytes_[submesh] += found.collective_bytes * times
        moving[submesh] += found.host_seconds * times
        held = (i for i in each.sharding.inputs if i.memory == "host")
        at_host[submesh].update((i.path, i.bytes) for i in held)
        done = sum(op.flops for op in each.sharding.operators) * times
        flops += done
        split += done * found.split_flops_fraction
    return Prediction(
        step_seconds=step_seconds,
        compute_seconds=max(compute.values(), default=0.0),
        collective_seconds=max(collective.values(), default=0.0),
        collective_bytes=max(bytes_.values(), default=0),
        peak_bytes=peak_bytes,
        bubble_fraction=bubble_fraction,
        optimality_gap=(
            max(step_seconds / bound_seconds - 1, 0.0) if bound_seconds else inf
        ),
        split_flops_fraction=split / flops if flops else 1.0,
        host_seconds=max(moving.values(), default=0.0),
        host_bytes=max((sum(each.values()) for each in at_host.values()), default=0),
    )


def with_budget(plan: Decision, budget_bytes: int) -> Decision:
    """The plan, which says within what budget it was made, if within any."""
    given = 0 if budget_bytes == NO_BUDGET else budget_bytes
    return replace(plan, predicted=replace(plan.predicted, budget_bytes=given))


def sharding_of(plan: ShardingPlan | StagedPlan) -> ShardingPlan:
    """How one program is split over the mesh.

    Raises:
      TypeError: the plan is that of a pipeline, which has one for each program.
    """
    if isinstance(plan, StagedPlan):
        raise TypeError(
            f"A plan of one program has a sharding, but that of {plan.function!r} is a "
            f"pipeline of {plan.num_stages} stages; use plan.stages.programs."
        )
    return plan


def stages_of(plan: ShardingPlan | StagedPlan) -> StagedPlan:
    """The stages of a pipeline.

    Raises:
      TypeError: the plan is of one program.
    """
    if isinstance(plan, ShardingPlan):
        raise TypeError(
            f"A plan of a pipeline has stages, but that of {plan.function!r} is one "
            f"program; use plan.sharding."
        )
    return plan
