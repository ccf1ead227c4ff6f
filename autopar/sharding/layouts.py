"""Layouts as DTensor users know them: made by name, printed and parsed as plans are.

A layout is a `jax.sharding.PartitionSpec`; its text has an entry for each dim:

    [data, model+pipe, -, ?]   split by `data`; by two axes, the first the most major;
                               whole; left to the solver
"""

from __future__ import annotations

import re
from collections.abc import Collection

from jax.sharding import PartitionSpec

FREE = PartitionSpec.UNCONSTRAINED
"""In a pin's PartitionSpec: a dim that is left to the solver."""

_WHOLE, _FREE, _AND = "-", "?", "+"


def replicated(rank: int) -> PartitionSpec:
    """Every dim of a tensor whole."""
    return PartitionSpec(*[None] * rank)


def batch_sharded(axis: str, rank: int) -> PartitionSpec:
    """The first of `rank` dims split by a mesh axis."""
    return PartitionSpec(axis, *[None] * (rank - 1))


def inner_sharded(axis: str, rank: int) -> PartitionSpec:
    """The last of `rank` dims split by a mesh axis."""
    return PartitionSpec(*[None] * (rank - 1), axis)


def without_dims(layout: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    """The layout of a tensor that `dims` are taken out of, as a reduction does."""
    rank = len(layout)
    for dim in dims:
        if not -rank <= dim < rank:
            raise ValueError(
                f"A dim to take out must be one of the {rank} of {layout}, but got "
                f"{dim}."
            )
    gone = {dim % rank for dim in dims}
    return PartitionSpec(*(e for dim, e in enumerate(layout) if dim not in gone))


def layout_text(layout: PartitionSpec, rank: int | None = None) -> str:
    """The text of a layout, with an entry for each of `rank` dims (its own if None)."""
    entries = [*layout, *[None] * ((rank or 0) - len(layout))]
    return f"[{', '.join(map(_entry_text, entries))}]"


def parse_layout(text: str) -> PartitionSpec:
    """The layout that a text such as `[data, -]` says.

    Raises:
      ValueError: it is no such text, or an axis is in it twice.
    """
    found = re.fullmatch(r"\s*\[(.*)\]\s*", text, re.DOTALL)
    if found is None:
        raise ValueError(
            f"A layout is written as an entry for each dim, such as '[data, -]', but "
            f"got {text!r}."
        )
    entries = found[1].split(",") if found[1].strip() else []
    layout = PartitionSpec(*(_parse_entry(entry, text) for entry in entries))
    axes = [axis for entry in layout for axis in _axes(entry)]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ValueError(
                f"A mesh axis may split one dim only, but {axis!r} is twice in "
                f"{text!r}; leave it out of one of the two."
            )
    return layout


def _entry_text(entry: object) -> str:
    return _FREE if entry is FREE else _AND.join(_axes(entry)) or _WHOLE


def _axes(entry: object) -> tuple[str, ...]:
    if entry is None or entry is FREE:
        return ()
    return entry if isinstance(entry, tuple) else (str(entry),)


def _parse_entry(entry: str, text: str) -> object:
    words = [word.strip() for word in entry.split(_AND)]
    alone = {"", _WHOLE, _FREE} if len(words) > 1 else {""}
    if alone & set(words):
        raise ValueError(
            f"An entry of a layout is axes joined by `+`, `-` for a whole dim or `?` "
            f"for a free one, but {text!r} has {entry.strip()!r}; write one entry for "
            f"each dim, as in '[data, a+b, -, ?]'."
        )
    if words in ([_WHOLE], [_FREE]):
        return None if words == [_WHOLE] else FREE
    return words[0] if len(words) == 1 else tuple(words)
