"""Pins: specs that a user fixes for arguments by path, before the solver chooses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from ..graph.op_graph import OpGraph, TensorType
from .layouts import FREE
from .mesh import MeshShape
from .spec import (
    Spec,
    axes_of_dim,
    from_partition_spec,
    is_legal,
    pending_axes,
)

PLACED = "placed"
"""In place of a pin's PartitionSpec: the argument stays where its array lies."""

PinLike: TypeAlias = PartitionSpec | NamedSharding | str
PinsLike: TypeAlias = Mapping[str, PinLike] | Sequence[tuple[str, PinLike]]
"""Specs of arguments by path or expression; as text `[data, -]`, or `placed`."""

BatchLike: TypeAlias = int | str | Sequence[int | str]
"""Positions of arguments, paths or expressions as those of pins, or "auto"."""


@dataclass(frozen=True)
class Pin:
    """The axes that must split each dim, most major first; None: the solver's choice.

    Axes that the pin does not name may split free dims only; those of `sums`, and no
    others, owe a reduction.
    """

    axes_by_dim: tuple[tuple[int, ...] | None, ...]
    sums: tuple[int, ...] = ()

    def allows(self, spec: Spec) -> bool:
        """Whether a spec splits every dim that is not free by its axes alone."""
        return pending_axes(spec) == self.sums and all(
            axes is None or axes_of_dim(spec, dim) == axes
            for dim, axes in enumerate(self.axes_by_dim)
        )


def resolve_pins(
    pins: Mapping[str, PartitionSpec], graph: OpGraph, mesh: MeshShape
) -> dict[int, Pin]:
    """The pin of every pinned argument, by the index of its tensor.

    Args:
      pins: by path, as the plan prints it (`params['mlp']['w1']`) or with slashes
        (`params/mlp/w1`), or by a regular expression that is found in either. A key
        that is a path is that alone; any other path takes the first expression that
        is found in it.
      graph: has the arguments and their paths.
      mesh: has the axes.

    Raises:
      TypeError: a value is no PartitionSpec.
      ValueError: a pin matches nothing, names an unknown axis or one axis twice, has
        more entries than its argument has dims, or does not divide them.
    """
    for key, spec in pins.items():
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"A pin must be a jax.sharding.PartitionSpec, but {key!r} has {spec!r} "
                f"of type {type(spec).__name__}; write PartitionSpec(...)."
            )
    resolved = {}
    for tensor, key in keys_of_arguments(pins, graph, "pin").items():
        kind, name = graph.tensors[tensor].type, graph.tensors[tensor].name
        where = f"the pin {key!r} of {name}, {kind},"
        resolved[tensor] = parse_pin(pins[key], kind, mesh, where)
    return resolved


def keys_of_arguments(
    keys: Collection[str], graph: OpGraph, noun: str
) -> dict[int, str]:
    """The key of every argument that has one, by the argument's tensor.

    A key that is a path is that alone; any other path takes the first of the others
    that is found in it as a regular expression.

    Raises:
      ValueError: a key matches nothing; `noun` is what it is the key of.
    """
    found = keys_of_paths(keys, [each.path for each in graph.inputs], noun)
    return {i.tensor: found[i.path] for i in graph.inputs if i.path in found}


def keys_of_paths(
    keys: Collection[str], paths: Sequence[str], noun: str = "pin"
) -> dict[str, str]:
    """As `keys_of_arguments`, by path."""
    check_matched(keys, paths, noun)
    names_of = {path: spellings(path) for path in paths}
    known = {name for names in names_of.values() for name in names}
    found = {}
    for path, names in names_of.items():
        own = [key for key in keys if key in names]
        own += [key for key in keys if key not in known and _is_found(key, names)]
        found |= {path: own[0]} if own else {}
    return found


def check_matched(keys: Iterable[str], paths: Sequence[str], noun: str = "pin") -> None:
    """Raise ValueError if a key is neither one of the paths nor found in one."""
    for key in keys:
        if not is_matched(key, paths):
            raise ValueError(_unmatched(key, paths, noun))


def is_path(key: str, paths: Sequence[str]) -> bool:
    """Whether a pin's key is one of the paths, in either spelling."""
    return any(key in spellings(path) for path in paths)


def is_matched(key: str, paths: Sequence[str]) -> bool:
    """Whether a pin's key is one of the paths, or an expression found in one."""
    both = map(spellings, paths)
    return any(key in names or _is_found(key, names) for names in both)


def spellings(path: str) -> tuple[str, str]:
    """How a path may be written: `params['mlp']['w1']` and `params/mlp/w1`."""
    return path, re.sub(r"[\[\].'\"]+", "/", path).strip("/")


def _is_found(expression: str, names: Sequence[str]) -> bool:
    try:
        return any(re.search(expression, name) for name in names)
    except re.error:  # a path, but not of this function
        return False


def _unmatched(key: str, paths: Sequence[str], noun: str) -> str:
    by_spelling = {name: path for path in paths for name in spellings(path)}
    by_spelling |= {name.split("/")[-1]: path for name, path in by_spelling.items()}
    close = difflib.get_close_matches(key, by_spelling, n=1, cutoff=0.3)
    remedy = f"did you mean {by_spelling[close[0]]}?" if close else "leave it out."
    return (
        f"A {noun} must be for the path of an argument or an expression found in one, "
        f"but {key!r} is in none of the {len(paths)}; {remedy}"
    )


def parse_pin(
    value: PartitionSpec, kind: TensorType, mesh: MeshShape, where: str
) -> Pin:
    """The pin of a tensor; `where` is what errors call it, which are `ValueError`."""
    entries = tuple(value)
    if len(entries) > kind.rank:
        raise ValueError(
            f"A pin must have at most one entry for each dim, but {where} is {value}; "
            f"drop {len(entries) - kind.rank} of its {len(entries)} entries."
        )
    entries += (None,) * (kind.rank - len(entries))
    fixed = PartitionSpec(*(None if entry is FREE else entry for entry in entries))
    try:
        spec = from_partition_spec(fixed, mesh.axis_names)
    except ValueError as error:
        raise ValueError(f"{error} This is {where.rstrip(',')}.") from None
    if kind.is_extended and any(state >= 0 for state in spec):
        raise ValueError(
            f"PRNG keys must lie whole on every device, but {where} is {value}; leave "
            f"it out."
        )
    if not is_legal(kind.shape, spec, mesh.axis_sizes):
        ring = " (for heads of attention its sequence, with attention='ring')"
        raise ValueError(
            f"Axes must divide the dims that they split, but {where} is {value} on the "
            f"mesh {mesh}; pin another dim{ring * (kind.rank > 2)} or leave it out."
        )
    return Pin(
        tuple(
            None if entry is FREE else axes_of_dim(spec, dim)
            for dim, entry in enumerate(entries)
        )
    )
