"""Lets examples index their own rows: what an iota indexes becomes a batching dim.

`x[jnp.arange(n), y]` gathers from all of `x` by pairs (i, y[i]), of which the first is
the number of the example itself. As a batching dim, as `jax.vmap` writes it, rules see
that each example reads (or scatters into) its own part alone: it is split and cut into
microbatches like any other work on examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from ..jax_compat import (
    CALLS,
    ClosedJaxpr,
    Literal,
    Var,
    is_zero_literal,
    with_eqns,
    with_jaxpr,
    with_jaxprs,
    with_scan_counts,
)

_LARGEST_CONSTANT = 1 << 20  # elements; larger ones are not looked into


@dataclass(frozen=True)
class _Count:
    """Integers that are their own position along `dim`, everywhere."""

    dim: int

    def moved(self, by: int) -> _Count | None:
        return _Count(self.dim + by) if self.dim + by >= 0 else None


@dataclass(frozen=True)
class _Vectors:
    """Index vectors along the last dim: which of their components count, and where."""

    components: tuple[_Count | None, ...]

    def moved(self, by: int) -> _Vectors:
        return _Vectors(tuple(c and c.moved(by) for c in self.components))


_Known = _Count | _Vectors | None


def with_batching_dims(closed: Any) -> Any:
    """The same jaxpr, in which iotas among the indices are batching dims."""
    return with_jaxpr(closed, _Scope.of(closed).rewritten)


@dataclass(frozen=True, eq=False)
class _Scope:
    """What is known of the variables of one jaxpr."""

    constants: Mapping[int, Any]
    known: dict[int, _Known] = field(default_factory=dict[int, _Known])
    made_by: dict[int, Any] = field(default_factory=dict[int, Any])

    @classmethod
    def of(cls, callee: Any) -> _Scope:
        """That of a jaxpr, closed or not, of whose arguments nothing is known."""
        if not isinstance(callee, ClosedJaxpr):
            return cls({})
        constants = zip(callee.jaxpr.constvars, callee.consts, strict=True)
        return cls({id(var): value for var, value in constants})

    def rewritten(self, jaxpr: Any) -> Any:
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            made = self.in_place_of(eqn)
            eqns.extend(made)
            self.made_by.update((id(var), made[-1]) for var in eqn.outvars)
        return with_eqns(jaxpr, eqns)

    def in_place_of(self, eqn: Any) -> list[Any]:
        kind, params = eqn.primitive.name, eqn.params
        if kind in _NAMES:
            return self.with_read_dims(eqn, _NAMES[kind])
        if kind == "scan":
            return [self.called(eqn, "jaxpr", self.of_scan(eqn), self.to_scan(eqn))]
        if kind in CALLS and hasattr(params.get(CALLS[kind]), "eqns"):
            given = [self.at(atom) for atom in eqn.invars]
            return [self.called(eqn, CALLS[kind], given, lambda made, _: made)]
        if len(eqn.outvars) == 1 and _is_integer(eqn.outvars[0]):
            self.known[id(eqn.outvars[0])] = self.made(eqn)
        return [with_jaxprs(eqn, lambda inner: _Scope({}).rewritten(inner))]

    def called(
        self,
        eqn: Any,
        name: str,
        given: Sequence[_Known],
        outside: Callable[[_Known, int], _Known],
    ) -> Any:
        """A call with its body rewritten, knowing what its operands are."""
        body = eqn.params[name]
        inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        if len(inner.invars) != len(given):
            return with_jaxprs(eqn, lambda inner: _Scope({}).rewritten(inner))
        scope = _Scope.of(body)
        scope.known.update(zip(map(id, inner.invars), given, strict=True))
        new = with_jaxpr(body, scope.rewritten)
        for position, var in enumerate(eqn.outvars):
            made = scope.at(inner.outvars[position])
            self.known[id(var)] = outside(made, position)
        return eqn if new is body else eqn.replace(params={**eqn.params, name: new})

    def of_scan(self, eqn: Any) -> list[_Known]:
        """What the body of a scan knows of its constants, carries and slices."""
        params = with_scan_counts(eqn.params)
        consts, carries = params["num_consts"], params["num_carry"]
        known = [self.at(atom) for atom in eqn.invars]
        slices = [each and each.moved(-1) for each in known[consts + carries :]]
        return [*known[:consts], *(None for _ in range(carries)), *slices]

    def to_scan(self, eqn: Any) -> Callable[[_Known, int], _Known]:
        carries = with_scan_counts(eqn.params)["num_carry"]

        def outside(made: _Known, position: int) -> _Known:
            return made.moved(1) if made and position >= carries else None

        return outside

    def at(self, atom: Any) -> _Known:
        if isinstance(atom, Literal):
            return None
        if id(atom) in self.constants:
            return _counted(self.constants[id(atom)])
        return self.known.get(id(atom))

    def made(self, eqn: Any) -> _Known:
        """What an equation with one result, of integers, makes."""
        (result,), params = eqn.outvars, eqn.params
        shape, limit = result.aval.shape, np.iinfo(result.aval.dtype).max
        match eqn.primitive.name:
            case "iota":
                found: _Known = _Count(params["dimension"])
            case "convert_element_type" if _is_integer(eqn.invars[0]):
                found = self.at(eqn.invars[0])
            case "select_n" if self.is_negative(*eqn.invars[:2]):
                found = self.at(eqn.invars[1])  # what is negative counts from the end
            case "broadcast_in_dim":
                found = _spread(self.at(eqn.invars[0]), eqn)
            case "reshape" if params.get("dimensions") is None:
                found = _reshaped(self.at(eqn.invars[0]), eqn.invars[0], shape)
            case "concatenate" if _joins_vectors(eqn):
                counts = [self.at(atom) for atom in eqn.invars]
                return _Vectors(
                    tuple(c if isinstance(c, _Count) else None for c in counts)
                )
            case _:
                return None
        fits = isinstance(found, _Count) and shape[found.dim] - 1 <= limit
        return found if fits or isinstance(found, _Vectors) else None

    def is_negative(self, predicate: Any, tested: Any) -> bool:
        """Whether a predicate is false, being where what counts is below zero."""
        if id(predicate) in self.constants:
            value = self.constants[id(predicate)]
            return value.size <= _LARGEST_CONSTANT and not np.any(np.asarray(value))
        maker = self.made_by.get(id(predicate))
        if maker is None or maker.primitive.name != "lt":
            return False
        left, right = maker.invars
        return left is tested and is_zero_literal(right)

    def with_read_dims(self, eqn: Any, names: _Names) -> list[Any]:
        """The equations in place of a gather or scatter: itself, if nothing counts."""
        operand, indices = eqn.invars[:2]
        vectors, numbers = self.at(indices), eqn.params["dimension_numbers"]
        if not isinstance(vectors, _Vectors):
            return [eqn]
        indexed = getattr(numbers, names.indexed)
        own: dict[int, int] = {}  # the operand's dim by that of the indices
        for count, dim in zip(vectors.components, indexed, strict=True):
            if count is None or dim not in getattr(numbers, names.dropped):
                continue
            is_whole = indices.aval.shape[count.dim] == operand.aval.shape[dim]
            if is_whole and count.dim not in (*own, *getattr(numbers, names.batching)):
                own[count.dim] = dim
        kept = [i for i, dim in enumerate(indexed) if dim not in own.values()]
        if not own or not kept or kept != list(range(kept[0], kept[-1] + 1)):
            return [eqn]
        part = _sliced(eqn, indices, kept[0], kept[-1] + 1)
        return [
            part,
            eqn.replace(
                invars=[operand, part.outvars[0], *eqn.invars[2:]],
                params={
                    **eqn.params,
                    "dimension_numbers": _with_batching(numbers, names, own),
                    "indices_are_sorted": False,
                },
            ),
        ]


def _is_integer(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and np.issubdtype(dtype, np.integer)


def _counted(value: Any) -> _Count | None:
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype) or not np.issubdtype(dtype, np.integer):
        return None
    if value.size > _LARGEST_CONSTANT:
        return None
    value = np.asarray(value)
    for dim, size in enumerate(value.shape):
        along = [size if d == dim else 1 for d in range(value.ndim)]
        if size > 1 and np.all(value == np.arange(size).reshape(along)):
            return _Count(dim)
    return None


def _spread(found: _Known, eqn: Any) -> _Count | None:
    """A count that is broadcast, if not along its own dim."""
    if not isinstance(found, _Count):
        return None
    target = eqn.params["broadcast_dimensions"][found.dim]
    before, (result,) = eqn.invars[0].aval.shape, eqn.outvars
    return _Count(target) if before[found.dim] == result.aval.shape[target] else None


def _reshaped(found: _Known, source: Any, after: Sequence[int]) -> _Count | None:
    """A count where only dims of size 1 come or go."""
    before = source.aval.shape
    if not isinstance(found, _Count) or before[found.dim] == 1:
        return None
    kept = [d for d, size in enumerate(before) if size != 1]
    new = [d for d, size in enumerate(after) if size != 1]
    if [before[d] for d in kept] != [after[d] for d in new]:
        return None
    return _Count(new[kept.index(found.dim)])


def _joins_vectors(eqn: Any) -> bool:
    """Whether a concatenation puts vectors together, one component an operand."""
    is_last = eqn.params["dimension"] == eqn.outvars[0].aval.ndim - 1
    return is_last and all(atom.aval.shape[-1] == 1 for atom in eqn.invars)


@dataclass(frozen=True)
class _Names:
    """What dimension numbers call the dims of the operand and of the indices."""

    indexed: str
    dropped: str
    batching: str


_GATHER = _Names(
    "start_index_map", "collapsed_slice_dims", "start_indices_batching_dims"
)
_SCATTER = _Names(
    "scatter_dims_to_operand_dims",
    "inserted_window_dims",
    "scatter_indices_batching_dims",
)
_SCATTERS = ("", "-add", "-sub", "-mul", "-min", "-max")
_NAMES = {"gather": _GATHER, **{f"scatter{each}": _SCATTER for each in _SCATTERS}}


def _sliced(eqn: Any, indices: Any, start: int, stop: int) -> Any:
    """An equation that takes some components of all index vectors, for `eqn`."""
    rows = indices.aval.shape[:-1]
    return eqn.replace(
        primitive=lax.slice_p,
        invars=[indices],
        outvars=[Var(indices.aval.update(shape=(*rows, stop - start)))],
        params={
            "start_indices": (*(0 for _ in rows), start),
            "limit_indices": (*rows, stop),
            "strides": None,
        },
    )


def _with_batching(numbers: Any, names: _Names, own: Mapping[int, int]) -> Any:
    """Dimension numbers in which `own` dims are batching dims, in order."""
    of_indices = getattr(numbers, names.batching)
    pairs = zip(numbers.operand_batching_dims, of_indices, strict=True)
    pairs = sorted([*pairs, *((dim, along) for along, dim in own.items())])

    def without(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(dim for dim in dims if dim not in own.values())

    return numbers._replace(
        **{
            names.indexed: without(getattr(numbers, names.indexed)),
            names.dropped: without(getattr(numbers, names.dropped)),
            names.batching: tuple(along for _, along in pairs),
            "operand_batching_dims": tuple(dim for dim, _ in pairs),
        }
    )
