"""The only file that may import from JAX what is not public, or differs by version."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jax
import numpy as np
from jax import lax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed, tree_util
from jax._src import pjit as _pjit
from jax._src.api_util import InternalFloatingPointError as InternalFloatingPointError
from jax._src.array import ArrayImpl
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla
from jax._src.lib import _jax
from jax.core import Tracer as Tracer
from jax.experimental.layout import Layout
from jax.extend import core, source_info_util
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, get_abstract_mesh, use_abstract_mesh

if TYPE_CHECKING:
    PyTreeDef: TypeAlias = Any  # JAX's own is a value to a type checker
else:
    from jax.tree_util import PyTreeDef as PyTreeDef

CONCRETE_ARRAY: Any = ArrayImpl  # the class of arrays with values, but for keys
ClosedJaxpr = core.ClosedJaxpr
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
Var = core.Var
DropVar = core.DropVar

dce_jaxpr: Any = partial_eval.dce_jaxpr
_in_cpp: Any = _jax
_jitted: Any = _pjit
_lowering: Any = _mlir
_settings: Any = _config
_is_outside_of_traces: Any = cast("Any", _core).trace_state_clean
NO_MESH = AbstractMesh((), ())
_MESH_PARAMS = ("sharding", "out_sharding")
CALLS = {  # where each keeps what it calls
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_partitioning": "call",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
    "eval_jaxpr": "jaxpr",
}
_BY_TRACE = _lowering.lower_fun(abs).__code__
_MOST_FRAMES = 32  # of the user's and of libraries, from the innermost out
_LIBRARIES = re.compile(
    r"(site|dist)-packages[/\\](flax|haiku|equinox|keras|optax|chex)[/\\]"
)
LOOPS = ("scan", "while", "cond")
CUDNN_VERSION = 91000  # what programs for GPUs that are not here are made for


class CudnnAttention:
    """What JAX has of cuDNN's attention: operators, their types, and what they run."""

    kinds = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
    calls = tuple(sorted({*_cudnn._custom_name_maps.values()}))  # in programs
    types: Any = (
        _cudnn._dot_product_attention_fwd_abstract,
        _cudnn._dot_product_attention_bwd_abstract,
    )
    runs: Any = (
        _cudnn._dot_product_attention_fwd_impl,
        _cudnn._dot_product_attention_bwd_impl,
    )
    masks: Any = _cudnn.MaskType


CUDNN_ATTENTION = CudnnAttention()


def assume_cudnn(is_assumed: Callable[[], bool]) -> None:
    """Lets cuDNN's attention be traced where it is not, while `is_assumed()`."""

    def version() -> int:
        if is_assumed():
            return CUDNN_VERSION
        raise RuntimeError("cuDNN is not detected.")  # as JAX says it

    if _cudnn.cuda_versions is None:
        _cudnn.cuda_versions = cast("Any", SimpleNamespace(cudnn_get_version=version))


def distributed_store() -> Any:
    """The key-value store of `jax.distributed`; None in a process on its own."""
    return distributed.global_state.client


def bits_of(array: Any) -> Any:
    """The array that holds the bits of keys; any other array itself."""
    return getattr(array, "_base_array", array)


def call_in_cpp(
    name: str,
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
    missed: Callable[..., tuple[Any, Any, bool]],
    seen: Callable[[Any, Any], Any],
) -> Callable[..., Any]:
    """A function whose calls C++ makes, as it does those of jitted functions.

    Calls with statics, trees, types or shardings not seen before are made by `missed`,
    which returns the result, what `path_in_cpp` returned, and whether to forget it.
    A leaf that is to be moved is `seen(leaf, sharding)` first.
    """
    keys, registry = pxla.JitGlobalCppCacheKeys(), tree_util.dispatch_registry
    static = list(static_argnums), list(static_argnames)

    def moved(leaf: Any, sharding: Any, layout: Any) -> Any:
        return pxla.cc_shard_arg(seen(leaf, sharding), sharding, layout)

    return _in_cpp.pjit(name, None, missed, *static, keys, registry, moved)


def path_in_cpp(
    compiled: Any,
    constants: Sequence[Any],
    leaves: Sequence[Any],
    outputs: Sequence[Any],
    results: Any,
) -> Any:
    """How C++ runs a compiled program on leaves like these; None if it cannot.

    The program takes `constants`, in their places, before the leaves; `outputs` are
    those of one call, and `results` is the tree to make of them.
    """
    if compiled._params.const_args:
        return None
    flat = tree_util.tree_structure(list(outputs))
    executable, nothing = compiled._executable, ((), (), None)
    bits = list(map(bits_of, constants))
    path = _jitted._get_fastpath_data(
        executable, flat, leaves, list(outputs), *nothing, bits
    )
    if path is None:
        return None
    _, tree = tree_util.dispatch_registry.flatten(results, None)
    return path._replace(out_pytree_def=tree)


class _OfAnyElementSize(Layout):
    """Equal to a layout that does not tell the bits of its elements."""

    __hash__ = Layout.__hash__

    def __eq__(self, other: object) -> bool:
        order, tiling = self.major_to_minor, self.tiling
        is_layout = isinstance(other, Layout)
        return is_layout and (other.major_to_minor, other.tiling) == (order, tiling)


def compiled(lowered: Any, options: Mapping[str, str], devices: Any = None) -> Any:
    """A lowered program compiled; it takes 4-bit arrays as jitted functions do.

    The layouts of these arrays do not tell the bits of an element, and those of a
    program do.
    """
    made = lowered.compile({**options}, device_assignment=devices)
    layouts = made._executable._xla_in_layouts
    layouts[:] = [
        _OfAnyElementSize(layout.major_to_minor, layout.tiling)
        if layout is not None and layout.sub_byte_element_size_in_bits
        else layout
        for layout in layouts
    ]
    return made


def with_jaxpr(callee: Any, changed: Callable[[Any], Any]) -> Any:
    """A jaxpr, closed or not, `changed`; itself if that is what `changed` returns."""
    if not isinstance(callee, ClosedJaxpr):
        return changed(callee)
    jaxpr = changed(callee.jaxpr)
    return callee if jaxpr is callee.jaxpr else ClosedJaxpr(jaxpr, callee.consts)


def plain_call(eqn: Any, callee: Any) -> Any:
    """The equation as a call of a jaxpr, closed or not, that nothing else belongs to.

    Names of arguments go: of functions with custom derivatives, JAX names more than
    the jaxpr has, and asserts later.
    """
    jaxpr, consts = callee, ()
    if hasattr(callee, "consts"):
        jaxpr, consts = callee.jaxpr, callee.consts
    nameless = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    params = {"call_jaxpr": ClosedJaxpr(jaxpr.replace(debug_info=nameless), consts)}
    return eqn.replace(primitive=core.primitives.closed_call_p, params=params)


def implementation(primitive: Any) -> Callable[..., Any] | None:
    """What JAX traces to lower a primitive; None if a platform has code of its own."""
    by_platform = _lowering._platform_specific_lowerings.values()
    tables = [_lowering._lowerings, *by_platform]
    rules = [table[primitive].rule for table in tables if primitive in table]
    if any(getattr(rule, "__code__", None) is not _BY_TRACE for rule in rules):
        return None
    return inspect.getclosurevars(rules[0]).nonlocals["fun"] if rules else None


def callee(eqn: Any) -> Any:
    """What a call calls, a jaxpr, closed or not; None of other equations."""
    name = CALLS.get(eqn.primitive.name)
    return name and eqn.params[name if name in eqn.params else "call_jaxpr"]


def abstract_value(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an aval, weak if that is."""
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def with_eqns(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """The jaxpr with these equations; itself if they are its own."""
    if [*map(id, eqns)] == [*map(id, jaxpr.eqns)]:
        return jaxpr
    return jaxpr.replace(eqns=[*eqns])


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's params, open."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def with_jaxprs(eqn: Any, changed: Callable[[Any], Any]) -> Any:
    """The equation with each jaxpr in its params `changed`, or itself if none is."""

    def inside(value: Any) -> Any:
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            return with_jaxpr(value, changed)
        if not isinstance(value, tuple):
            return value
        values = tuple(map(inside, value))
        if all(new is old for new, old in zip(values, value, strict=True)):
            return value
        return type(value)(*values) if hasattr(value, "_fields") else values

    params = {name: inside(value) for name, value in eqn.params.items()}
    if all(params[name] is value for name, value in eqn.params.items()):
        return eqn
    return eqn.replace(params=params)


@contextmanager
def without_mesh() -> Iterator[None]:
    """No mesh of the caller's; inside of a transformation, none in the types alone."""
    if get_abstract_mesh().empty:
        yield
    elif _is_outside_of_traces():
        with jax.set_mesh(None):
            yield
    else:
        with use_abstract_mesh(NO_MESH):
            yield


@contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """The settings an equation was traced under, but for the mesh: ours stays."""
    mesh = get_abstract_mesh()
    # Two meshes may follow each other only if one is empty or their sizes are equal.
    with eqn.ctx.manager, use_abstract_mesh(NO_MESH), use_abstract_mesh(mesh):
        yield


def bind(primitive: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Bind a primitive, without what its params say of the mesh it was traced on."""
    params = {k: None if k in _MESH_PARAMS else v for k, v in params.items()}
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def with_scan_counts(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The params of a scan with `num_consts` and `num_carry`, which jax 0.11 left out.

    There `ft_in` holds the trees of its constants, carries and slices.
    """
    if "num_carry" in params:
        return params
    consts, carry, _ = params["ft_in"].unpack()
    return {**params, "num_consts": len(consts), "num_carry": len(carry)}


def is_checking_values() -> bool:
    """Whether the caller asked for an error where NaN or infinity comes up."""
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs


def trace_context() -> Any:
    """The caller's settings that a trace depends on, such as `jax.enable_x64`."""
    return _settings.trace_context()


def is_jit_disabled() -> bool:
    """Whether the caller asked for plain Python, by `jax.disable_jit` for one."""
    config: Any = jax.config
    return config.jax_disable_jit


def literal_value(literal: Any) -> np.ndarray:
    """A literal as a bare scalar: JAX's own holds the mesh that it was traced on."""
    return np.asarray(literal.val, literal.aval.dtype)


def is_zero_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a literal zero."""
    return isinstance(atom, Literal) and not np.any(literal_value(atom))


def weakly_typed(x: Any) -> Any:
    """The same array with a dtype that gives way, as a Python number's does."""
    return lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


def user_context(eqn: Any) -> AbstractContextManager[None]:
    """Equations made in here get the source line of `eqn`."""
    return source_info_util.user_context(eqn.source_info.traceback)


def innermost_locations() -> AbstractContextManager[None]:
    """Programs lowered in here say of an operator the innermost line only."""
    return _config.traceback_in_locations_limit(1)


def source_line(eqn: Any) -> str:
    """`file.py:12:3 (function)` of the user's line that made an equation.

    Of layers and optimizers that a library has, it is the line that calls them.
    """
    return _line_of(eqn.source_info.traceback)


@lru_cache(maxsize=1 << 14)
def _line_of(traceback: Any) -> str:
    """Equations of one line have equal tracebacks: of many there are few."""
    info = source_info_util.new_source_info().replace(traceback=traceback)
    frames = source_info_util.summarize(info, _MOST_FRAMES).splitlines()
    own = (line for line in reversed(frames) if not _LIBRARIES.search(line))
    return next(own, frames[-1] if frames else "")


def name_scope(eqn: Any) -> str:
    """The name stack of an equation: named scopes and transformations."""
    return str(eqn.source_info.name_stack)
