"""`autopar.parallelize`: plan, lower and run an ordinary train step."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from math import inf
from typing import (
    Any,
    Generic,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import jax

from .clusters.cluster import Cluster
from .clusters.hardware import nearest
from .frontend.calls import (
    Call,
    Form,
    key_of,
    open_call,
    parted,
    plain_function,
    types_of,
)
from .frontend.constant_leaves import ResultTree, takes_only_arrays
from .frontend.static_arguments import StaticArguments
from .frontend.tracing import (
    argument_paths,
    check_leaves,
    is_tracing,
    parameter_names,
)
from .jax_compat import InternalFloatingPointError, is_jit_disabled
from .lowering.programs import SignatureChanged
from .methods.methods import Auto, Method, ShardParallel
from .options import (
    Options,
    check_options,
    resolve_options,
)
from .pipelines.pipeline_choice import plan_call
from .pipelines.pipeline_plan import PlannedPipeline
from .pipelines.state_init import PlacedInit, placed_state, stage_homes, whole_homes
from .planner.attention_trace import with_fused_attention
from .planner.pin_costs import PinCosts
from .planner.planned import Planned
from .planner.signatures import tell_user
from .planner.traced_init import step_call, trace_init
from .sharding.jit_shardings import with_result_pins
from .sharding.mesh import MeshLike
from .sharding.pins import BatchLike, PinsLike
from .steps.compiling import fitting_figures, lowered_step
from .steps.execution import (
    MISSED,
    DirectCalls,
    ReadyCall,
    compiled_only,
    end_workers,
    ready_call,
    run_init,
    staged_plan,
)
from .steps.lowered_pipeline import LoweredPipeline
from .steps.lowered_step import Lowered, Traced
from .steps.parallel_plan import Plan
from .steps.planned_step import PlannedStep
from .steps.step_origin import with_origin
from .targets.target import check_compilable, is_compiled_elsewhere

_P = ParamSpec("_P")
_R = TypeVar("_R")


class ParallelizeArguments(TypedDict, total=False):
    """The arguments of `autopar.parallelize` besides the function."""

    method: Method | None
    mesh: MeshLike | None
    cluster: Cluster | None
    plan: Plan | None
    like: Plan | str | os.PathLike[str] | None
    pins: PinsLike | None
    rules: Any
    memory_budget: int | str | None
    remat: str | None
    offload: str | None
    attention: str | None
    num_microbatches: int | None
    batch_argnums: BatchLike
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    donate_argnums: int | Sequence[int] | Literal["auto"]
    donate_argnames: str | Sequence[str]
    in_shardings: Any
    out_shardings: Any


class ParallelFunction(Generic[_P, _R]):
    """A function that runs split over a mesh; made by `autopar.parallelize`.

    Call it as the function it wraps. Each new set of argument shapes is planned and
    compiled once.
    """

    def __init__(self, fun: Callable[_P, _R], options: Options) -> None:
        functools.update_wrapper(self, fun)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._options = resolve_options(fun, options)
        self._fun = with_result_pins(fun, options.out_shardings)
        static = self._options.static_argnums
        names = self._options.names_at(static, options.static_argnames)
        self._static = StaticArguments(static, names)
        self._only_arrays = takes_only_arrays(fun)
        self.clear_cache()

    def clear_cache(self) -> None:
        """Forget all plans and programs, as `jax.jit(f).clear_cache` does."""
        self._steps: dict[Any, PlannedStep] = {}  # by keys and types of calls
        self._latest: PlannedStep | None = None
        self._lock = threading.RLock()
        self._direct = DirectCalls(self._name, self._parted, self._ready)

    def __repr__(self) -> str:
        method, mesh = type(self._options.method).__name__, self._options.mesh
        on = "" if mesh is None else f", mesh={mesh}"
        return f"<autopar.parallelize({self._name}, {method}(){on})>"

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if is_tracing() or is_jit_disabled():
            return self._fun(*args, **kwargs)
        result = self._direct(args, kwargs)
        if result is not MISSED:
            return result
        try:
            with self._open(args, kwargs) as call:
                return self._run(call)
        except InternalFloatingPointError as found:
            self._fun(*args, **kwargs)  # raises where it comes up, as jax.jit does
            raise FloatingPointError(
                f"Values must be finite under jax_debug_nans and jax_debug_infs, but "
                f"one of {self._name} is not: {found}. Run operation by operation "
                f"all are, so rounding is to blame; switch the check off to go on."
            ) from None

    def _run(self, call: Call) -> Any:
        if call.has_modules:
            result = self._direct.by_key(call.form, call.leaves)
            if result is not MISSED:
                return call.finish(result)
        latest = self._latest
        if latest is not None and latest.key == call.key:
            with suppress(SignatureChanged):
                return call.run(*latest.run)
        with self._lock:
            step = self._latest = self._step(call)
            run = step.run
        return call.run(*run)

    def _parted(self, args: Any, kwargs: Any) -> tuple[Form, Sequence[Any]] | None:
        return parted(*self._static.split(args, kwargs), self._only_arrays)

    def _ready(self, form: Form, leaves: Sequence[Any]) -> ReadyCall | None:
        step = self._steps.get((key_of(form), types_of(leaves)))
        return ready_call(*step.run) if step and step.has_run else None

    def plan(self, *args: Any, compile: bool = False, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or jax.ShapeDtypeStruct in their place.

        Needs no device of the target cluster. With `compile`, `plan.compiled` has what
        the cluster's own compiler makes of it; raises TargetError where there is none,
        and InfeasiblePlanError if its devices hold less.
        """
        if compile:
            check_compilable(self._options.cluster, self._options.mesh)
        plan = self._plan(args, kwargs, inf if compile else 0.0)
        if not compile:
            return plan
        return replace(plan, compiled=fitting_figures(self.lower(*args, **kwargs)))

    def _plan(self, args: Any, kwargs: Any, elsewhere_seconds: float) -> Plan:
        with self._open(args, kwargs) as call, self._lock:
            step = self._step(call, elsewhere_seconds)
            if step.plan is None:
                step.plan = with_origin(step.planned, self._fun, call, self._options)
            return step.plan

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The step as JAX traces it, before it is planned, as `jax.jit(f).trace`."""
        with self._open(args, kwargs) as call:
            fun, own, keywords = self._traced_call(call)
            traced = jax.jit(fun).trace(*own, **keywords)
        lower = functools.partial(self.lower, *args, **kwargs)
        return Traced(self._name, traced.jaxpr, traced.out_info, lower)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The types of the results, as `jax.jit(f).eval_shape`; plans nothing."""
        found = self.trace(*args, **kwargs).out_info
        tree = ResultTree.of(jax.tree.structure(found))
        return tree.unflatten(jax.tree.leaves(found))

    def pin_costs(self, *args: Any, **kwargs: Any) -> PinCosts:
        """What each pin adds to a step; it is solved again without each of them."""
        return self.plan(*args, **kwargs).pin_costs()

    def lower(self, *args: Any, **kwargs: Any) -> Lowered | LoweredPipeline:
        """Lower for these arguments, as `jax.jit(f).lower` does; runs nothing."""
        with self._open(args, kwargs) as call, self._lock:
            step = self._step(call)
            planned = step.planned
            if not isinstance(planned, PlannedPipeline):
                return lowered_step(planned, self._only_arrays)
            is_absent = is_compiled_elsewhere(planned.cluster, self._options.mesh)
            runs = compiled_only(planned) if is_absent else step.pipelined
            return LoweredPipeline(runs, Plan(staged_plan(planned)), self._only_arrays)

    def init(
        self, init_fn: Callable[..., Any], *args: Any, batch: Any, **kwargs: Any
    ) -> Any:
        """The state that `init_fn(*args, **kwargs)` returns, made where it is used.

        Each device makes its own part and none is sent. Values are those of one device;
        what has no split form (orthogonal kernels, `rbg` bits) is whole in passing.

        Args:
          init_fn: returns the state argument of this function, or a tuple of them.
          args: arguments of `init_fn`; those that are no arrays are constants to it.
          batch: the other arguments of this function, arrays or jax.ShapeDtypeStruct:
            the argument itself, a tuple of several, or a dict of them by name.
          kwargs: keyword arguments of `init_fn`.

        Raises:
          TypeError: this function cannot be called with such a state and batch.
          ValueError: some state of this function is not what `init_fn` returns.
        """
        placed = self._placed_init(init_fn, args, kwargs, batch)
        return run_init(placed, self._options.cluster or Cluster.local())

    def abstract_state(
        self, init_fn: Callable[..., Any], *args: Any, batch: Any, **kwargs: Any
    ) -> Any:
        """What `init` would return, as shapes with shardings: makes no arrays.

        `autopar.restore(path, step.abstract_state(...))` reads a checkpoint into the
        places of this function's plan. Arguments and errors are those of `init`.
        """
        return placed_state(self._placed_init(init_fn, args, kwargs, batch))

    @property
    def options(self) -> Options:
        """What it was made with."""
        return self._options

    def close(self) -> None:
        """End the workers on a Ray cluster, with all arrays; a call starts new ones."""
        end_workers(self._running())

    def _running(self) -> list[Any]:
        """What runs the calls that were made."""
        return [each.run[0] for each in self._steps.values() if each.has_run]

    def _placed_init(
        self, init_fn: Callable[..., Any], args: Any, kwargs: Any, batch: Any
    ) -> PlacedInit:
        init = trace_init(init_fn, args, kwargs)
        step = step_call(init, batch, self._fun, self._static, self._only_arrays)
        with self._open(*step) as call, self._lock:
            step = self._step(call)
            planned = step.planned
            if isinstance(planned, PlannedPipeline):
                pipeline = step.pipelined.pipeline
                homes, traced = stage_homes(pipeline), pipeline.traced
            else:
                homes, traced = whole_homes(planned.program_here), planned.traced
            return PlacedInit.of(init, call.leaves, homes, traced)

    def _open(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Call]:
        return open_call(self._static, args, kwargs, self._only_arrays)

    def _step(self, call: Call, elsewhere_seconds: float = 0.0) -> PlannedStep:
        """What is known of calls of this key and these types, which is planned once.

        With `elsewhere_seconds` a plan of one program is made again, as it is then
        compiled, and corrected, also for devices that are not here.
        """
        traced = self._traced_call(call)
        key = call.key, types_of(call.leaves)
        known = self._steps.get(key)
        if known and isinstance(known.planned, PlannedPipeline):
            return known
        if known and not elsewhere_seconds:
            return known
        options = self._options
        if known and isinstance(options.method, Auto):  # it is one program
            options = replace(options, method=ShardParallel())
        planned = plan_call(traced, options, staged_plan, elsewhere_seconds)
        step = self._steps.setdefault(key, PlannedStep(call.key, planned))
        step.planned, step.plan = planned, None
        if isinstance(planned, Planned):
            every = [each.planned for each in self._steps.values()]
            tell_user([each for each in every if isinstance(each, Planned)])
        return step

    def _traced_call(self, call: Call) -> tuple[Callable[..., Any], Any, Any]:
        """What a call traces: a function and its arguments."""
        fun = plain_function(self._fun, call.statics)
        if self._options.attention == "fused":
            cluster = self._options.cluster or Cluster.local()
            fun = with_fused_attention(fun, cluster.device.kind)
        args, kwargs = call.arguments()
        names = parameter_names(fun, len(args))
        check_leaves(call.leaves, argument_paths(names, args, kwargs))
        return fun, args, kwargs


@overload
def parallelize(
    fun: Callable[_P, _R], **options: Unpack[ParallelizeArguments]
) -> ParallelFunction[_P, _R]: ...
@overload
def parallelize(
    fun: None = None, **options: Unpack[ParallelizeArguments]
) -> Callable[[Callable[_P, _R]], ParallelFunction[_P, _R]]: ...
def parallelize(
    fun: Callable[..., Any] | None = None, **options: Unpack[ParallelizeArguments]
) -> Any:
    """Run an ordinary JAX function split over many devices.

    Use it as `@autopar.parallelize`, `@autopar.parallelize(mesh=...)` or
    `autopar.parallelize(step, ...)`. The function is traced as `jax.jit` traces it, a
    solver chooses how each operator is split, and the result is one explicit SPMD
    program. Values equal those of `jax.jit` on one device up to rounding.

    Args:
      fun: a function of pytrees of arrays; typically `step(state, batch)` that returns
        `(state, metrics)`.
      method: which kinds of parallelism to use; `autopar.Auto()` if left out.
      mesh: a `jax.sharding.Mesh`, `"data:2;model:4"`, a dict, or a tuple of sizes; -1
        fills. All devices along one axis if left out.
      cluster: the hardware to plan for; `Cluster.local()` if left out.
      plan: a plan to run as it is, from `step.plan` or `Plan.load`.
      like: a plan of an earlier form of the step, or the path of one: arguments that
        are still there keep their place, the rest is solved. What could not be kept is
        logged.
      pins: how arguments lie on the mesh, by path or regular expression (the path
        first, then the first expression that is found in it), as a PartitionSpec, a
        NamedSharding on the step's mesh, or a text such as `"[data, -]"`;
        `autopar.FREE` leaves a dim to the solver, and `"placed"` an argument where its
        array lies. The solver chooses all the rest.
      rules: `autopar.LayoutRules`, which give mesh axes to named dims wherever these
        are; a string such as `"batch:data"` where only the batch has a name.
      memory_budget: what a device may hold, as bytes or a text such as "70GiB"; its
        memory less a reserve if left out. Where the devices are in this process, plans
        that come near it are compiled, and planned again if the program needs more.
      remat: what the backward pass makes again instead of keeping: "selective" (scores
        of attention), "cheap" (all but products), "full" (layers), or "auto": what the
        budget takes. jax.checkpoint in the step is kept to in any case.
      offload: "optimizer_state" keeps what only the update reads in the host's memory,
        "auto" as much of it as the budget takes, what is used last first; "state" the
        parameters, too. jax.checkpoint policies that offload are kept to in any case.
      attention: "fused": attention, however it is written, is one kernel that keeps no
        scores in memory: cuDNN's on NVIDIA GPUs, splash attention on TPUs, plain
        operators on CPUs. What has no kernel stays as it is written, with a warning.
      num_microbatches: how many parts of the batch run one after the other; gradients
        are added up and reduced once. Values stay those of the whole batch, unless
        the method has `microbatch_semantics="independent"`.
      batch_argnums: what is cut along dim 0: positions of arguments, or paths and
        expressions as for pins; "auto": what losses are summed over.
      static_argnums: positions of arguments that are compile-time constants.
      static_argnames: names of such arguments.
      donate_argnums: positions whose buffers may be reused; "auto": those of state, the
        arguments that come back as they were, made of what they held (no gradients).
      donate_argnames: names of such arguments.
      in_shardings: as that of `jax.jit`: for each argument a tree of NamedSharding or
        PartitionSpec, or a prefix of it. They are kept, and what is None is planned.
      out_shardings: the same of the results.

    Raises:
      TypeError: an unknown method, or a function that cannot be called.
      ValueError: a mesh that does not fit the devices.
      NotImplementedError: an option that is on the roadmap.
      InfeasiblePlanError: at the first plan, if nothing fits the memory budget; it
        names the least budget that would do.
    """
    known = ParallelizeArguments.__annotations__
    for name in options:
        if name not in known:
            near = nearest(name, known)
            raise TypeError(f"autopar.parallelize has no option {name!r}{near}")
    checked = check_options(**options)

    def wrap(fun: Callable[..., Any]) -> ParallelFunction[..., Any]:
        if not callable(fun):
            raise TypeError(
                f"autopar.parallelize needs a function, but got {fun!r} of type "
                f"{type(fun).__name__}."
            )
        return ParallelFunction(fun, checked)

    return wrap if fun is None else wrap(fun)


# What help and editors show are the options with their defaults.
_own = inspect.signature(parallelize).parameters["fun"]
_named = inspect.signature(check_options).parameters.values()
parallelize.__signature__ = inspect.Signature([_own, *_named], return_annotation=Any)  # type: ignore[attr-defined]
