"""The only file that may import from JAX what is not public, or differs by version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, get_abstract_mesh, use_abstract_mesh

ClosedJaxpr = core.ClosedJaxpr
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
Var = core.Var
DropVar = core.DropVar

NO_MESH = AbstractMesh((), ())
_MESH_PARAMS = ("sharding", "out_sharding")


def dead_code_eliminated(closed: Any) -> Any:
    """The same jaxpr without equations that no output needs; inputs stay all."""
    jaxpr, _ = partial_eval.dce_jaxpr(
        closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
    )
    return ClosedJaxpr(jaxpr, closed.consts)


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


def literal_value(literal: Any) -> np.ndarray:
    """A literal as a bare scalar: JAX's own holds the mesh that it was traced on."""
    return np.asarray(literal.val, literal.aval.dtype)


def weakly_typed(x: Any) -> Any:
    """The same array with a dtype that gives way, as a Python number's does."""
    return lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


@contextmanager
def user_context(eqn: Any) -> Iterator[None]:
    """Equations made in here get the source line and name stack of `eqn`."""
    info = eqn.source_info
    with source_info_util.user_context(info.traceback, name_stack=info.name_stack):
        yield


def source_line(eqn: Any) -> str:
    """`file.py:12:3 (function)` of the user's line that made an equation."""
    return source_info_util.summarize(eqn.source_info)


def name_scope(eqn: Any) -> str:
    """The name stack of an equation: named scopes and transformations."""
    return str(eqn.source_info.name_stack)
