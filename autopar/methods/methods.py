"""Methods: what kinds of parallelism a plan may use. The solver does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

from ..option_values import SEMANTICS, MicrobatchSemantics, one_of
from ..plans.plan_view import Decision
from ..plans.staged_plan import StagedPlan
from ..sharding.mesh import MeshLike, MeshShape
from .named_methods import NAMED_METHODS, Megatron, NamedMethod, ThreeD
from .place_operators import PlaceOperators
from .schedule_choice import SCHEDULES, ScheduleFunction, ScheduleRows, check_schedule

Objective = Literal["time", "memory"]
AttentionKind = Literal["auto", "operators", "ring"]


@dataclass(frozen=True)
class Auto:
    """Search everything: one program on all devices, or a pipeline, by predicted time.

    Pipelines are searched across hosts, or where nothing else fits into memory. A step
    that cannot be cut into microbatches exactly just gets none.
    """


@dataclass(frozen=True)
class ShardParallel:
    """Intra-operator parallelism: every operator is split over the whole mesh.

    Args:
      num_microbatches: how many parts of the batch are run one after the other;
        microbatch m holds the examples i with i mod `num_microbatches` = m.
      microbatch_semantics: "exact": values are those of the whole batch, and a step
        that cannot be cut so (BatchNorm in training) is refused. "independent": each
        microbatch runs as if it were the batch. Losses, gradients and statistics are
        then the means over the microbatches, integers (counts) are summed, maxima and
        minima of examples are those of all, values for each example are joined, and
        the optimizer runs once. The loss must be a mean:
        of a sum over the batch you get the mean of the microbatches' sums. BatchNorm's
        running statistics move once a step, by the mean of the microbatches'
        statistics. Random keys are the same in every microbatch.
      objective: "time": the fastest step that fits the budget. "memory": the plan that
        is found to hold the least on a device, whatever it costs.
      attention: "auto": as is cheapest. "operators": as the step says it, so that its
        sequence is gathered, exchanged for heads, or not split. "ring": keys and values
        go round the devices of a mesh axis that splits the sequence, and scores are
        there block by block (2310.01889); for heads that no device count divides, and
        for sequences whose scores do not fit.
    """

    num_microbatches: int = 1
    microbatch_semantics: MicrobatchSemantics = "exact"
    objective: Objective = "time"
    attention: AttentionKind = "auto"


@dataclass(frozen=True)
class PipelineParallel:
    """Inter-operator parallelism: stages on submeshes, a microbatch after the other.

    A step without a backward pass (evaluation) runs forward only, whatever the
    schedule. Values for each example come back in the order of the batch.

    Args:
      num_stages: into how many parts the layers are cut.
      num_microbatches: how many parts of the batch follow each other.
      schedule: "1f1b", "eager_1f1b" (more forwards ahead, so that no stage waits for
        values on their way), "gpipe", "interleaved", "zb_h1" or "zb_h2" (zero bubble:
        the part of backward that only parameters need runs later, where the submesh
        would wait), or a function of the numbers of stages and microbatches that
        returns a row of tasks for each submesh, such as `["0F0 0B0 0A", "1F0 1B0 1A"]`:
        stage, F(orward), B(ackward), W(eight) or A(pply), microbatch.
      stages_per_submesh: how many stages share a submesh, in turns: stage s runs on
        submesh s mod their number. More than 1 needs the interleaved schedule.
      stage_meshes: the shape of each submesh, such as `["x:4", "x:2", "x:2"]`. If left
        out, the devices are dealt out evenly and `mesh` of `parallelize` is the shape
        of one part. Stages that do not divide the devices have theirs, and their
        layers, searched for; some devices may be left over.
      microbatch_semantics: "exact" or "independent", as for `ShardParallel`.
      stage_products: how many products (matrix products, convolutions) the forward
        pass of each stage has, those of every layer of a scan apart; stages of about
        equal work if left out.
      layer_costs: instead, a cost for each of these products in order, in any unit:
        the slowest stage is then the fastest that contiguous stages can have.
      inside: what a stage does, where the solver is not to choose: `autopar.ThreeD`'s.

    Without `num_stages`, stages and their submeshes are searched for, and with them
    whatever is left out of `num_microbatches`, `schedule` and `mesh`.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | ScheduleFunction = "1f1b"
    stages_per_submesh: int = 1
    stage_meshes: Sequence[MeshLike] | None = None
    microbatch_semantics: MicrobatchSemantics = "exact"
    stage_products: Sequence[int] | None = None
    layer_costs: Sequence[float] | None = None
    inside: Megatron | None = None

    @property
    def num_submeshes(self) -> int:
        """How many parts the devices are dealt out in."""
        assert self.num_stages is not None
        return self.num_stages // self.stages_per_submesh


Method = Auto | ShardParallel | PipelineParallel | PlaceOperators | NamedMethod
# All of these say how many microbatches there are, and what they mean.
Microbatched = ShardParallel | PipelineParallel | NamedMethod
METHODS = (Auto, ShardParallel, PipelineParallel, PlaceOperators, *NAMED_METHODS)


def check_method(method: object) -> Method:
    """The method, or a TypeError that says what could be given.

    Raises NotImplementedError for what is on the roadmap.
    """
    if method is None:
        return Auto()
    if isinstance(method, type) and issubclass(method, METHODS):
        raise TypeError(
            f"`method` must be an instance, but got the class {method.__name__}; write "
            f"{method.__name__}()."
        )
    if not isinstance(method, METHODS):
        names = ", ".join(f"autopar.{kind.__name__}()" for kind in METHODS)
        raise TypeError(
            f"`method` must be one of {names} or None, but got {method!r} of type "
            f"{type(method).__name__}."
        )
    if isinstance(method, Microbatched):
        one_of("microbatch_semantics", method.microbatch_semantics, SEMANTICS)
    if isinstance(method, ShardParallel) and (
        method.objective not in get_args(Objective)
    ):
        raise ValueError(
            f"`objective` must be 'time' or 'memory', but got {method.objective!r}."
        )
    if isinstance(method, ShardParallel) and (
        method.attention not in get_args(AttentionKind)
    ):
        raise ValueError(
            f"`attention` must be 'auto', 'operators' or 'ring', but got "
            f"{method.attention!r}."
        )
    if isinstance(method, ThreeD) and method.pipeline > 1:
        mesh = MeshShape(("data", "tensor"), (method.data, method.tensor))
        method = PipelineParallel(
            method.pipeline,
            method.num_microbatches,
            stage_meshes=(mesh,) * method.pipeline,
            microbatch_semantics=method.microbatch_semantics,
            inside=Megatron(method.tensor, method.sequence),
        )
    if isinstance(method, PipelineParallel):
        _check_pipeline(method)
    return method


def _check_pipeline(method: PipelineParallel) -> None:
    for name in ("num_stages", "num_microbatches", "stages_per_submesh"):
        number = getattr(method, name)
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(
                f"`{name}` must be a whole number from 1 up, but got {number!r}."
            )
    if method.num_stages == 1:
        raise ValueError(
            "A pipeline has two stages or more, but `num_stages` is 1; for one stage "
            "use autopar.ShardParallel(num_microbatches=...)."
        )
    check_schedule(method.schedule)
    costs = method.layer_costs
    if costs is not None and (min(costs, default=0) < 0 or not 0 < sum(costs) < inf):
        raise ValueError(
            f"`layer_costs` must be numbers from 0 up, not all 0, but got {costs!r}."
        )
    if costs is not None and method.stage_products is not None:
        raise ValueError(
            "`stage_products` says where stages begin and `layer_costs` has it found, "
            "but both were given; leave one out."
        )
    if method.num_stages is not None:
        _check_submeshes(method)
    elif not (method.stage_meshes is method.stage_products is costs is None):
        raise ValueError(
            "Stages that are searched for get their meshes and products from the "
            "search, but `stage_meshes`, `stage_products` or `layer_costs` were given "
            "without `num_stages`; give the number of stages, or leave them out."
        )


def _check_submeshes(method: PipelineParallel) -> None:
    num_stages, shared = method.num_stages, method.stages_per_submesh
    assert num_stages is not None
    is_by_name = isinstance(method.schedule, str)
    if is_by_name and (shared > 1) != (method.schedule == "interleaved"):
        raise ValueError(
            f"Stages share a submesh in the interleaved schedule and in no other, but "
            f"got schedule={method.schedule!r} and stages_per_submesh={shared}; use "
            f"schedule='interleaved', stages_per_submesh=2, or neither."
        )
    if num_stages % shared:
        raise ValueError(
            f"`stages_per_submesh` must divide `num_stages`, which is {num_stages}, "
            f"but got {shared}."
        )
    if method.num_submeshes == 1:
        raise ValueError(
            f"A pipeline has two submeshes or more, but {num_stages} stages share one; "
            f"use fewer `stages_per_submesh`."
        )
    number = method.num_microbatches
    if (
        is_by_name
        and shared > 1
        and number is not None
        and number % method.num_submeshes
    ):
        above = -(-number // method.num_submeshes) * method.num_submeshes
        raise ValueError(
            f"An interleaved schedule takes microbatches in groups of one for each "
            f"submesh, but {number} is no multiple of {method.num_submeshes}; use "
            f"num_microbatches={above}."
        )
    meshes = method.stage_meshes
    if meshes is not None and len(meshes) != method.num_submeshes:
        raise ValueError(
            f"`stage_meshes` must have the shape of each of {method.num_submeshes} "
            f"submeshes, but got {len(meshes)}: {list(meshes)}."
        )


def method_of_plan(plan: StagedPlan) -> PipelineParallel:
    """The method that plans a pipeline as it is.

    Raises:
      NotImplementedError: its operators were placed, which a file cannot repeat.
    """
    if plan.is_placed:
        raise NotImplementedError(
            "A plan of placed operators is not run from a file yet; give the method "
            "and its seed again, autopar.PlaceOperators(...), which places them alike."
        )
    is_named = plan.schedule in SCHEDULES
    return PipelineParallel(
        plan.num_stages,
        plan.num_microbatches,
        plan.schedule if is_named else ScheduleRows(plan.schedule, plan.rows),
        plan.num_stages // len(plan.meshes),
        plan.meshes,
        plan.microbatch_semantics,
        plan.stage_products or None,
    )


def method_beside(
    plan: Decision | None, like: Decision | None, method: Method
) -> Method:
    """The method that a plan of a pipeline was made with; it may be given again."""
    if isinstance(like, StagedPlan):
        return method_of_plan(like) if isinstance(method, Auto) else method
    if plan is None:
        return method
    if not isinstance(plan, StagedPlan):
        if isinstance(method, PipelineParallel):
            raise ValueError(
                f"A plan is run as it is, but `plan` is of one program and the method "
                f"is {method}; leave the method out."
            )
        return method
    own = method_of_plan(plan)
    given = own if isinstance(method, Auto) else method
    if isinstance(given, PipelineParallel):
        given = replace(
            given,
            stage_meshes=own.stage_meshes,
            stage_products=own.stage_products,
            layer_costs=None,
            inside=None,
        )
        if given.num_stages is None:
            given = own
    if given != own:
        raise ValueError(
            f"A plan is run as it is, but `plan` is of a pipeline made with {own}, and "
            f"the method is {method}; leave the method out."
        )
    return own


def num_microbatches_of(given: int | None, method: Method) -> int:
    """The one number that `num_microbatches` and the method agree on."""
    of_method = method.num_microbatches if isinstance(method, Microbatched) else None
    if given is not None and of_method not in (None, 1, given):
        raise ValueError(
            f"`num_microbatches` is {given}, but the method is {method}; give it once."
        )
    number = given if given is not None else of_method or 1
    if not isinstance(number, int) or number < 1:
        raise ValueError(
            f"`num_microbatches` must be a whole number from 1 up, but got {number!r}."
        )
    return number
