"""An init function, traced, and the call of a step that takes what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ..planner.whole_step import roles_of

StepCall = tuple[tuple[Any, ...], Mapping[str, Any]]


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


def step_call(init: TracedInit, batch: Any, fun: Callable[..., Any]) -> StepCall:
    """The arguments of the step `fun`: the state's types, and the batch.

    A tuple of states or of batches may be spread over as many arguments, a dict of
    batches be given by keyword. Of several that the signature allows, the first that
    leaves no parameter to its default is meant.

    Raises:
      TypeError: the signature allows none.
    """
    state = init.state(init.types)
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return (state, *(batch if type(batch) is tuple else (batch,))), {}
    calls = [call for call in _spellings(state, batch) if _binds(signature, call)]
    if not calls:
        name = getattr(fun, "__name__", type(fun).__name__)
        raise TypeError(
            f"The state that init_fn returns and `batch` must be the arguments of the "
            f"step, but {name}{signature} cannot be called with "
            f"{_counted(state, 'state')} and {_counted(batch, 'batch')}; let init_fn "
            f"return a tuple of all state arguments, and pass the others as a tuple "
            f"batch=(...)."
        )
    number = sum(each.default is each.empty for each in signature.parameters.values())
    exact = (call for call in calls if len(call[0]) + len(call[1]) == number)
    return next(exact, calls[0])


def _spellings(state: Any, batch: Any) -> Iterator[StepCall]:
    states = [(state,), *([state] if type(state) is tuple else [])]
    batches = [(batch,), *([batch] if type(batch) is tuple else [])]
    yield from (((*first, *then), {}) for then in batches for first in states)
    if isinstance(batch, Mapping) and all(isinstance(k, str) for k in batch):
        yield from ((first, dict(batch)) for first in states)


def _binds(signature: inspect.Signature, call: StepCall) -> bool:
    try:
        signature.bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def _counted(value: Any, noun: str) -> str:
    return f"one {noun}" + f" or {len(value)}" * (type(value) is tuple)


@contextmanager
def noting_state(init: TracedInit) -> Iterator[None]:
    """Errors that are raised in here say which state the step was planned for."""
    try:
        yield
    except Exception as error:
        kinds = zip(init.paths, init.types, strict=True)
        some = [f"{path or 'it'} is {x.dtype}{list(x.shape)}" for path, x in kinds]
        more = f", and {len(some) - 4} more" * (len(some) > 4)
        error.add_note(
            f"raised where the step meets the state that init_fn returns, of which "
            f"{', '.join(some[:4])}{more}"
        )
        raise


def _is_static(argument: Any) -> bool:
    """Whether an argument is a leaf that no trace takes: a config, a module, a name."""
    leaves = jax.tree.leaves(argument)
    return len(leaves) == 1 and leaves[0] is argument and not is_array_leaf(argument)


def _is_weak(aval: Any) -> bool:
    return getattr(aval, "weak_type", False)
