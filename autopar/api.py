"""`autopar.parallelize`: plan, lower and run an ordinary train step."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.runtime.local import LocalExecutable
from autopar.runtime.schedule import gpipe, one_f_one_b
from autopar.runtime.worker import PipelineExecutable

from .calls import Call, open_call, plain_function
from .cluster import Cluster
from .constant_leaves import ResultTree, takes_only_arrays
from .distributed_array import DistributedArray
from .jax_compat import InternalFloatingPointError, is_jit_disabled
from .lowered_step import Lowered
from .mesh import MeshLike, MeshShape
from .methods import Method, PipelineParallel
from .options import Options, check_options, resolve_options
from .parallel_plan import Plan
from .pipeline import PipelinedStep, build_pipeline
from .planning import Planned, leaves_of, many_signatures, plan_function
from .programs import SignatureChanged, SpmdProgram, build_program
from .resharding import Resharder
from .static_arguments import StaticArguments
from .tracing import (
    argument_paths,
    check_leaves,
    is_tracing,
    parameter_names,
    weak_outputs,
)

_log = logging.getLogger("autopar")
_MANY_SIGNATURES = 8  # from then on a user should know that each is compiled
Executable = LocalExecutable | PipelinedStep


class ParallelFunction:
    """A function that runs split over a mesh; made by `autopar.parallelize`.

    Call it as the function it wraps. Each new set of argument shapes is planned and
    compiled once.
    """

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fun)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._fun, self._options = fun, resolve_options(fun, options)
        static = self._options.static_argnums
        self._static = StaticArguments(static, self._options.names_at(static))
        self._only_arrays = takes_only_arrays(fun)
        self._planned: dict[Any, Planned] = {}
        self._programs: dict[Planned, SpmdProgram] = {}
        self._executables: dict[Planned, LocalExecutable] = {}
        self._pipelines: dict[Any, PipelinedStep] = {}
        self._latest: dict[Any, tuple[Executable, ResultTree]] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing() or is_jit_disabled():
            return self._fun(*args, **kwargs)
        try:
            return self._run(args, kwargs)
        except InternalFloatingPointError as found:
            self._fun(*args, **kwargs)  # raises where it comes up, as jax.jit does
            raise FloatingPointError(
                f"Values must be finite under jax_debug_nans and jax_debug_infs, but "
                f"one of {self._name} is not: {found}. Run operation by operation "
                f"all are, so rounding is to blame; switch the check off to go on."
            ) from None

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._open(args, kwargs) as call:
            latest = self._latest.get(call.key)
            if latest is not None:
                executable, result_tree = latest
                try:
                    return call.result(result_tree, executable(call.leaves))
                except SignatureChanged:
                    pass
            executable, result_tree = self._executable(call)
            return call.result(result_tree, executable(call.leaves))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or jax.ShapeDtypeStruct in their place.

        Needs no device of the target cluster.
        """
        with self._open(args, kwargs) as call:
            return self._plan(call).plan

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lower for these arguments, as `jax.jit(f).lower` does; runs nothing."""
        with self._open(args, kwargs) as call, self._lock:
            planned = self._plan(call)
            program = self._program(planned)
        return Lowered(
            program, planned.plan, planned.traced, planned.graph, self._only_arrays
        )

    def _open(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Call]:
        return open_call(self._static, args, kwargs, self._only_arrays)

    def _executable(self, call: Call) -> tuple[Executable, ResultTree]:
        """What runs this call and calls of its types, and the tree of its results."""
        with self._lock:
            if isinstance(self._options.method, PipelineParallel):
                return self._pipelined(call, self._options.method)
            planned = self._plan(call)
            if planned not in self._executables:
                program = self._program(planned)
                self._executables[planned] = LocalExecutable(program)
            executable = self._executables[planned]
            result_tree = ResultTree.of(planned.traced.out_tree)
            self._latest[call.key] = executable, result_tree
            return executable, result_tree

    def _pipelined(
        self, call: Call, method: PipelineParallel
    ) -> tuple[PipelinedStep, ResultTree]:
        key = call.key, tuple(map(_abstract, call.leaves))
        if key not in self._pipelines:
            fun = plain_function(self._fun, call.statics)
            args, kwargs = call.arguments()
            pipeline = build_pipeline(fun, args, kwargs, method, self._options)
            make_schedule = {"1f1b": one_f_one_b, "gpipe": gpipe}[method.schedule]
            program = pipeline.program
            schedule = make_schedule(program.num_stages, program.num_microbatches)
            execute = PipelineExecutable(program, schedule)
            self._pipelines[key] = PipelinedStep(pipeline, execute)
        step = self._pipelines[key]
        result_tree = ResultTree.of(step.pipeline.traced.out_tree)
        self._latest[call.key] = step, result_tree
        return step, result_tree

    def _plan(self, call: Call) -> Planned:
        """The plan for the types of a call's arguments, made once."""
        if isinstance(self._options.method, PipelineParallel):
            raise NotImplementedError(
                "A pipeline has a plan for each stage program, and `plan` and `lower` "
                "do not show them yet (docs/roadmap.md); call the step, or use "
                "autopar.ShardParallel()."
            )
        fun = plain_function(self._fun, call.statics)
        args, kwargs = call.arguments()
        names = parameter_names(fun, len(args))
        check_leaves(call.leaves, argument_paths(names, args, kwargs))
        key = call.key, tuple(map(_abstract, call.leaves))
        with self._lock:
            if key not in self._planned:
                planned = plan_function(fun, args, kwargs, self._options)
                if not self._planned:
                    _log.info(planned.summary())
                    for note in planned.roles.notes:
                        _log.warning(note)
                self._planned[key] = planned
                if len(self._planned) == _MANY_SIGNATURES + 1:
                    first = next(iter(self._planned.values()))
                    _log.warning(many_signatures(first, planned, _MANY_SIGNATURES))
            return self._planned[key]

    def _device_mesh(self, shape: MeshShape) -> Mesh:
        given = self._options.mesh
        if isinstance(given, Mesh):
            devices = given.devices
        else:
            available = jax.devices()
            if len(available) < shape.size:
                raise ValueError(
                    f"The mesh {shape} needs {shape.size} devices, but this process "
                    f"has {len(available)}; use a smaller mesh, or plan only with "
                    f"step.plan(...), which needs no devices."
                )
            devices = np.array(available[: shape.size]).reshape(shape.axis_sizes)
        auto = (AxisType.Auto,) * shape.num_axes
        return Mesh(devices, shape.axis_names, axis_types=auto)

    def _program(self, planned: Planned) -> SpmdProgram:
        """The program of a plan: one for its calls and all that `lower` returns."""
        if planned not in self._programs:
            sharding = planned.plan.sharding
            self._programs[planned] = build_program(
                planned.graph,
                sharding,
                Resharder(sharding.mesh, planned.cluster),
                self._device_mesh(sharding.mesh),
                planned.argument_types,
                planned.traced.jaxpr.consts,
                self._donated(planned),
                weak_outputs(planned.traced),
            )
        return self._programs[planned]

    def _donated(self, planned: Planned) -> tuple[int, ...]:
        """Positions of the leaves whose buffers the step may reuse."""
        chosen = self._options.donate_argnums
        if chosen == "auto":
            roles = planned.roles.roles
            return tuple(i for i, role in enumerate(roles) if role == "state")
        return tuple(leaves_of(planned.traced, chosen, self._options))


@overload
def parallelize(
    fun: Callable[..., Any],
    *,
    method: Method | None = None,
    mesh: MeshLike | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    pins: Mapping[str, PartitionSpec]
    | Sequence[tuple[str, PartitionSpec]]
    | None = None,
    rules: Any = None,
    memory_budget: int | str | None = None,
    num_microbatches: int | None = None,
    batch_argnums: int | Sequence[int] | Literal["auto"] = "auto",
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] | Literal["auto"] = "auto",
) -> ParallelFunction: ...
@overload
def parallelize(
    fun: None = None,
    *,
    method: Method | None = None,
    mesh: MeshLike | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    pins: Mapping[str, PartitionSpec]
    | Sequence[tuple[str, PartitionSpec]]
    | None = None,
    rules: Any = None,
    memory_budget: int | str | None = None,
    num_microbatches: int | None = None,
    batch_argnums: int | Sequence[int] | Literal["auto"] = "auto",
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] | Literal["auto"] = "auto",
) -> Callable[[Callable[..., Any]], ParallelFunction]: ...
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | None = None,
    mesh: MeshLike | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    pins: Mapping[str, PartitionSpec]
    | Sequence[tuple[str, PartitionSpec]]
    | None = None,
    rules: Any = None,
    memory_budget: int | str | None = None,
    num_microbatches: int | None = None,
    batch_argnums: int | Sequence[int] | Literal["auto"] = "auto",
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] | Literal["auto"] = "auto",
) -> ParallelFunction | Callable[[Callable[..., Any]], ParallelFunction]:
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
      pins: how arguments lie on the mesh, by path or regular expression (the path
        first, then the first expression that is found in it); `autopar.FREE` leaves a
        dim to the solver. What is not pinned the solver chooses.
      num_microbatches: how many parts of the batch run one after the other; gradients
        are added up and reduced once. Values stay those of the whole batch.
      batch_argnums: positions of the arguments that are cut along dim 0; "auto": those
        that are not state and share the commonest leading size.
      static_argnums: positions of arguments that are compile-time constants.
      donate_argnums: positions whose buffers may be reused; "auto": those of state,
        the arguments that are returned with the same tree, shapes and dtypes.

    Raises:
      TypeError: an unknown method, or a function that cannot be called.
      ValueError: a mesh that does not fit the devices.
      NotImplementedError: an option that is on the roadmap.
    """
    options = check_options(
        method=method,
        mesh=mesh,
        cluster=cluster,
        plan=plan,
        pins=pins,
        rules=rules,
        memory_budget=memory_budget,
        num_microbatches=num_microbatches,
        batch_argnums=batch_argnums,
        static_argnums=static_argnums,
        donate_argnums=donate_argnums,
    )

    def wrap(fun: Callable[..., Any]) -> ParallelFunction:
        if not callable(fun):
            raise TypeError(
                f"autopar.parallelize needs a function, but got {fun!r} of type "
                f"{type(fun).__name__}."
            )
        return ParallelFunction(fun, options)

    return wrap if fun is None else wrap(fun)


def _abstract(leaf: Any) -> tuple[Any, ...]:
    """What a leaf's trace depends on: shape, dtype and weak type."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    if isinstance(leaf, DistributedArray):
        return leaf.shape, leaf.dtype, False
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
