"""An init function, traced, and the call of a step that takes what it returns."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..frontend.calls import open_call, plain_function
from ..frontend.constant_leaves import ResultTree
from ..frontend.nnx import merge_modules, split_result
from ..frontend.static_arguments import StaticArguments
from ..frontend.tracing import is_array_leaf, trace
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..graph.traced_function import TracedFunction
from .whole_step import roles_of

StepCall = tuple[tuple[Any, ...], Mapping[str, Any]]
# What Python and JAX say where a step is given arguments that it is not made for.
_MISFITS = (
    *(TypeError, ValueError, LookupError, AttributeError),
    *(AssertionError, ArithmeticError, RuntimeError),
)


@dataclass(frozen=True, eq=False)
class TracedInit:
    """An init function at one signature.

    `values` are what its graph is fed with: the leaves of its arguments, then the
    arrays that it closes over. `types` are those of the leaves of its result.
    """

    traced: TracedFunction
    graph: OpGraph
    values: tuple[Any, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]
    _tree: ResultTree

    def state(self, leaves: Sequence[Any]) -> Any:
        """The result of the init function with these leaves, of whatever type."""
        return merge_modules(self._tree.unflatten(leaves))


def trace_init(
    init_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TracedInit:
    """Trace `init_fn(*args, **kwargs)`; arguments that are no arrays are constants."""
    arguments = [*enumerate(args), *kwargs.items()]
    statics = tuple((key, type(arg), arg) for key, arg in arguments if _is_static(arg))
    dynamic = [arg for arg in args if not _is_static(arg)]
    keywords = {name: arg for name, arg in kwargs.items() if not _is_static(arg)}
    with open_call(StaticArguments(), dynamic, keywords) as call:
        fun = plain_function(split_result(init_fn), statics)
        traced = trace(fun, *call.arguments())
        avals = traced.jaxpr.out_avals
        types = tuple(
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=_is_weak(a)) for a in avals
        )
        return TracedInit(
            traced,
            build_graph(traced, roles_of(traced)),
            (*call.leaves, *traced.jaxpr.consts),
            types,
            tuple(path.removeprefix("out") for path in traced.output_paths),
            ResultTree.of(traced.out_tree),
        )


def step_call(
    init: TracedInit,
    batch: Any,
    fun: Callable[..., Any],
    static: StaticArguments,
    only_arrays: bool,
) -> StepCall:
    """The arguments of the step `fun`: the state's types, and the batch.

    A tuple of states or of batches may be spread over as many arguments, a dict of
    batches be given by keyword. Where the signature allows several, that one is meant
    which returns what `init` makes as state.

    Raises:
      TypeError: the signature allows none.
      Exception: the step's own, of a class that says nothing of its arguments.
    """
    calls = _step_calls(fun, init.state(init.types), batch)
    made = set(map(id, init.types))
    for args, kwargs in calls if len(calls) > 1 else ():
        with open_call(static, args, kwargs, only_arrays) as call:
            try:
                plain = plain_function(fun, call.statics)
                roles = roles_of(trace(plain, *call.arguments())).roles
            except _misfits():
                continue
        pairs = zip(call.leaves, roles, strict=True)
        if any(id(leaf) in made and role == "state" for leaf, role in pairs):
            return args, kwargs
    return calls[0]


def _misfits() -> tuple[type[Exception], ...]:
    """Flax has a class of its own for what its modules say of other variables."""
    flax = sys.modules.get("flax.errors")
    return _MISFITS if flax is None else (*_MISFITS, flax.FlaxError)


def _step_calls(fun: Callable[..., Any], state: Any, batch: Any) -> list[StepCall]:
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return [((state, *(batch if type(batch) is tuple else (batch,))), {})]
    calls = [
        (args, kwargs)
        for args, kwargs in _spellings(state, batch)
        if _binds(signature, args, kwargs)
    ]
    if calls:
        return calls
    name = getattr(fun, "__name__", type(fun).__name__)
    raise TypeError(
        f"The state that init_fn returns and `batch` must be the arguments of the "
        f"step, but {name}{signature} cannot be called with {_counted(state, 'state')} "
        f"and {_counted(batch, 'batch')}; let init_fn return a tuple of all state "
        f"arguments, and pass the others as a tuple batch=(...)."
    )


def _spellings(state: Any, batch: Any) -> Iterator[StepCall]:
    for first in [(state,), *([state] if type(state) is tuple else [])]:
        yield (*first, batch), {}
        if type(batch) is tuple:
            yield (*first, *batch), {}
        if isinstance(batch, Mapping) and all(isinstance(k, str) for k in batch):
            yield first, dict(batch)


def _binds(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _counted(value: Any, noun: str) -> str:
    return f"one {noun}" + f" or {len(value)}" * (type(value) is tuple)


def _is_static(argument: Any) -> bool:
    """Whether an argument is a leaf that no trace takes: a config, a module, a name."""
    leaves = jax.tree.leaves(argument)
    return len(leaves) == 1 and leaves[0] is argument and not is_array_leaf(argument)


def _is_weak(aval: Any) -> bool:
    return getattr(aval, "weak_type", False)
