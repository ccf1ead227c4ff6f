"""`autopar.parallelize`: plan, lower and run an ordinary train step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from . import rules as _rules
from .build_graph import build_graph, tensor_type
from .cluster import Cluster
from .graph import OpGraph
from .intra_op import plan_intra_op, warn_fallbacks
from .lowered_step import Lowered
from .mesh import MeshLike, MeshShape, parse_mesh
from .methods import Method, check_method
from .parallel_plan import Plan
from .pins import resolve_pins
from .plan_file import check_against
from .programs import SignatureChanged, SpmdProgram, build_program
from .resharding import Resharder
from .roles import Roles, infer_roles
from .runtime.local import LocalExecutable
from .tracing import (
    TracedFunction,
    argument_paths,
    check_leaves,
    parameter_names,
    trace,
)

_log = logging.getLogger("autopar")
assert _rules  # imported so that every rule registers


@dataclass(frozen=True)
class _Options:
    """What `parallelize` was called with."""

    method: Method
    mesh: MeshLike | None
    cluster: Cluster | None
    plan: Plan | None
    pins: Mapping[str, PartitionSpec]
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...] | Literal["auto"]


@dataclass(frozen=True, eq=False)
class _Planned:
    """One signature of the function: its trace, graph, plan and argument types."""

    traced: TracedFunction
    graph: OpGraph
    roles: Roles
    plan: Plan
    cluster: Cluster
    argument_types: tuple[jax.ShapeDtypeStruct, ...]


class ParallelFunction:
    """A function that runs split over a mesh; made by `autopar.parallelize`.

    Call it as the function it wraps. Each new set of argument shapes is planned and
    compiled once.
    """

    def __init__(self, fun: Callable[..., Any], options: _Options) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._options = fun, options
        self._planned: dict[Any, _Planned] = {}
        self._executables: dict[Any, tuple[LocalExecutable, Any]] = {}
        self._latest: dict[Any, tuple[LocalExecutable, Any]] = {}
        self._described = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamic, statics = self._split_static(args)
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        latest = self._latest.get((tree, statics))
        if latest is not None:
            executable, out_tree = latest
            try:
                return jax.tree.unflatten(out_tree, executable(leaves))
            except SignatureChanged:
                pass
        key = (tree, statics, self._signature(leaves, args, kwargs))
        if key not in self._executables:
            planned = self._plan(key, args, kwargs)
            program = self._program(planned)
            self._executables[key] = (LocalExecutable(program), planned.traced.out_tree)
        executable, out_tree = self._latest[(tree, statics)] = self._executables[key]
        return jax.tree.unflatten(out_tree, executable(leaves))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or jax.ShapeDtypeStruct in their place.

        Needs no device of the target cluster.
        """
        return self._plan(self._key(args, kwargs), args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lower for these arguments, as `jax.jit(f).lower` does; runs nothing."""
        planned = self._plan(self._key(args, kwargs), args, kwargs)
        program = self._program(planned)
        return Lowered(program, planned.plan, planned.traced, planned.graph)

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        dynamic, statics = self._split_static(args)
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        return tree, statics, self._signature(leaves, args, kwargs)

    def _split_static(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        static = self._options.static_argnums
        if not static:
            return tuple(args), ()
        chosen = {i % len(args) for i in static} if args else set()
        statics = tuple((i, args[i]) for i in sorted(chosen))
        try:
            hash(statics)
        except TypeError as error:
            raise ValueError(
                f"Static arguments must be hashable, but got {statics}; pass tuples "
                f"instead of lists, or leave the argument out of static_argnums."
            ) from error
        return tuple(a for i, a in enumerate(args) if i not in chosen), statics

    def _signature(
        self, leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        dynamic, statics = self._split_static(args)
        fun = self._dynamic_function(statics)
        names = parameter_names(fun, len(dynamic))
        check_leaves(leaves, argument_paths(names, dynamic, kwargs))
        return tuple(_abstract(leaf) for leaf in leaves)

    def _dynamic_function(self, statics: Any) -> Callable[..., Any]:
        """The function of the arguments that are not static."""
        if not statics:
            return self._fun

        @functools.wraps(self._fun)
        def fun(*dynamic: Any, **kwargs: Any) -> Any:
            args = list(dynamic)
            for index, value in statics:
                args.insert(index, value)
            return self._fun(*args, **kwargs)

        names = parameter_names(self._fun, len(statics) + 64)
        kept = [n for i, n in enumerate(names) if i not in dict(statics)]
        fun.__signature__ = _signature_of(kept)  # type: ignore[attr-defined]
        return fun

    def _plan(
        self, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Planned:
        if key in self._planned:
            return self._planned[key]
        dynamic, statics = self._split_static(args)
        traced = trace(self._dynamic_function(statics), dynamic, kwargs)
        jaxpr = traced.jaxpr.jaxpr
        in_types = [tensor_type(var.aval) for var in jaxpr.invars]
        out_types = [tensor_type(var.aval) for var in jaxpr.outvars]
        roles = infer_roles(
            traced.in_tree, traced.out_tree, in_types, out_types, traced.input_paths
        )
        graph = build_graph(traced, roles)
        cluster = self._options.cluster or Cluster.local()
        mesh = self._mesh_shape(cluster)
        if not self._described:
            self._described = True
            _log.info(
                "%s on %s: %s", traced.name, mesh, roles.summary(traced.input_paths)
            )
            for note in roles.notes:
                _log.warning(note)
        plan = self._options.plan
        if plan is None:
            warn_fallbacks(graph)
            start = perf_counter()
            pins = resolve_pins(self._options.pins, graph, mesh)
            solution = plan_intra_op(graph, mesh, cluster, pins=pins)
            plan = Plan(solution.plan)
            _log.info(
                "%s: planned %d operators in %.1f s, gap %.3g%%",
                traced.name,
                len(graph.operators()),
                perf_counter() - start,
                100 * solution.assignment.gap,
            )
        else:
            check_against(plan.sharding, graph)
        types = tuple(
            jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=var.aval.weak_type)
            for t, var in zip(in_types, jaxpr.invars, strict=True)
        )
        self._planned[key] = _Planned(traced, graph, roles, plan, cluster, types)
        return self._planned[key]

    def _mesh_shape(self, cluster: Cluster) -> MeshShape:
        if self._options.plan is not None:
            return self._options.plan.sharding.mesh
        if self._options.mesh is not None:
            return parse_mesh(self._options.mesh, cluster.num_devices)
        if cluster.num_hosts > 1:
            return MeshShape(
                ("data", "model"), (cluster.num_hosts, cluster.devices_per_host)
            )
        return MeshShape(("x",), (cluster.num_devices,))

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

    def _program(self, planned: _Planned) -> SpmdProgram:
        sharding = planned.plan.sharding
        return build_program(
            planned.graph,
            sharding,
            Resharder(sharding.mesh, planned.cluster),
            self._device_mesh(sharding.mesh),
            planned.argument_types,
            planned.traced.jaxpr.consts,
            self._donated(planned),
        )

    def _donated(self, planned: _Planned) -> tuple[int, ...]:
        """Positions of the leaves whose buffers the step may reuse."""
        chosen = self._options.donate_argnums
        if chosen == "auto":
            roles = planned.roles.roles
            return tuple(i for i, role in enumerate(roles) if role == "state")
        args, _ = jax.tree.unflatten(
            planned.traced.in_tree, range(planned.traced.in_tree.num_leaves)
        )
        static = {i for i in self._options.static_argnums}
        dynamic = [i for i in range(len(args) + len(static)) if i not in static]
        return tuple(
            leaf
            for position, argument in zip(dynamic, args, strict=True)
            if position in chosen
            for leaf in jax.tree.leaves(argument)
        )


@overload
def parallelize(fun: Callable[..., Any], **options: Any) -> ParallelFunction: ...
@overload
def parallelize(
    fun: None = None, **options: Any
) -> Callable[[Callable[..., Any]], ParallelFunction]: ...
def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | None = None,
    mesh: MeshLike | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    rules: Any = None,
    memory_budget: int | str | None = None,
    num_microbatches: int | None = None,
    batch_argnums: Sequence[int] | Literal["auto"] = "auto",
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
      static_argnums: positions of arguments that are compile-time constants.
      donate_argnums: positions whose buffers may be reused; "auto": those of state,
        the arguments that are returned with the same tree, shapes and dtypes.

    Raises:
      TypeError: an unknown method, or a function that cannot be called.
      ValueError: a mesh that does not fit the devices.
      NotImplementedError: an option that is on the roadmap.
    """
    later = {
        "rules": rules,
        "memory_budget": memory_budget,
        "num_microbatches": num_microbatches if num_microbatches != 1 else None,
        "batch_argnums": batch_argnums if batch_argnums != "auto" else None,
    }
    for name, value in later.items():
        if value is not None:
            raise NotImplementedError(
                f"`{name}` is not there yet (docs/roadmap.md), but got {value!r}; "
                f"leave it out."
            )
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(
            f"`plan` must be an autopar.Plan, but got {plan!r} of type "
            f"{type(plan).__name__}; load a file with autopar.Plan.load(path)."
        )
    if plan is not None and pins:
        raise ValueError(
            f"A plan is run as it is, so `pins` must be left out with `plan`, but got "
            f"{list(pins)}; plan with them: parallelize(f, pins=...).plan(...)."
        )
    if cluster is not None and not isinstance(cluster, Cluster):
        raise TypeError(
            f"`cluster` must be an autopar.Cluster, but got {cluster!r}; use "
            f"autopar.Cluster.local(), .preset('8xH100') or .load(path)."
        )
    options = _Options(
        check_method(method),
        mesh,
        cluster,
        plan,
        dict(pins or {}),
        _positions(static_argnums),
        "auto" if donate_argnums == "auto" else _positions(donate_argnums),
    )

    def wrap(fun: Callable[..., Any]) -> ParallelFunction:
        if not callable(fun):
            raise TypeError(
                f"autopar.parallelize needs a function, but got {fun!r} of type "
                f"{type(fun).__name__}."
            )
        return ParallelFunction(fun, options)

    return wrap if fun is None else wrap(fun)


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _abstract(leaf: Any) -> tuple[Any, ...]:
    """What a leaf's trace depends on: shape, dtype and weak type."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)


def _signature_of(names: Sequence[str]) -> Any:
    import inspect

    return inspect.Signature(
        [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        if any("[" in name for name in names)
        else [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in dict.fromkeys(names)
            if name.isidentifier()
        ]
    )
