"""A collective as a plan, a lowered program and a compiled program all state it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Literal, TypeAlias, get_args

import jax.numpy as jnp

Groups = tuple[tuple[int, ...], ...]

CollectiveKind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"
]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
KINDS = (*COLLECTIVE_KINDS, "collective_broadcast")
# On booleans the two spellings are one reduction.
_BOOL_REDUCTION = {"max": "or", "min": "and"}
# What MLIR (i32, ui8, f8E4M3FN) and HLO (s32, u8, f8e4m3fn) call numpy's types.
_DTYPE_PREFIXES = {
    "f": "float",
    "bf": "bfloat",
    "i": "int",
    "s": "int",
    "u": "uint",
    "ui": "uint",
    "c": "complex",
}


@dataclass(frozen=True, order=True)
class Collective:
    """One collective of one step, with the traffic it stands for.

    Two of them are equal when they move the same bytes in the same way between the same
    devices equally often; where they come from does not matter.

    Args:
      kind: one of `KINDS`.
      groups: device ids (positions in the mesh) that communicate. Groups are sorted;
        inside a group the order is kept, as it says whose part goes where, but for
        `all_reduce`, where it means nothing. For `collective_permute`: the sorted
        (source, target) pairs.
      dtype: numpy's name of the element type.
      bytes: bytes of the result on one device, of one execution.
      count: executions a step, the product of the enclosing trip counts.
      reduction: sum, product, max, min, and, or; empty where nothing is reduced.
      source: operator name and source line, where known.
      conditional: stands in a branch that may not be taken, and is counted as if it is.
      unbounded: stands in a loop of unknown trip count, and is counted once.
      is_async: of a compiled program: other work may run while it does.
      num_combined: how many pieces one operation of a compiled program sends together,
        of which this is one.
      by_all_reduce: of a compiled program: written as an all_reduce, which sends twice
        as much.
      may_round: of a compiled program for TPUs: what is only read in a narrower type,
        as products read float32, may be reduced in that.
      is_again: of a compiled program: the compiler makes a value again, rather than
        keep it.
    """

    kind: str
    groups: Groups
    dtype: str
    bytes: int
    count: int = 1
    reduction: str = ""
    source: str = field(default="", compare=False)
    conditional: bool = field(default=False, compare=False)
    unbounded: bool = field(default=False, compare=False)
    is_async: bool = field(default=False, compare=False)
    num_combined: int = field(default=1, compare=False)
    by_all_reduce: bool = field(default=False, compare=False)
    may_round: bool = field(default=False, compare=False)
    is_again: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"the `kind` of a collective must be one of {', '.join(KINDS)}, "
                f"but got {self.kind!r}."
            )
        groups = canonical_groups(self.kind, tuple(map(tuple, self.groups)))
        object.__setattr__(self, "groups", groups)
        if self.dtype == "bool":
            reduction = _BOOL_REDUCTION.get(self.reduction, self.reduction)
            object.__setattr__(self, "reduction", reduction)

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count != 1 else ""
        marks = " conditional" * self.conditional + " unbounded" * self.unbounded
        source = f"  # {self.source}" if self.source else ""
        return (
            f"{self.name} {times}{self.bytes:,} B {self.dtype} "
            f"over {format_groups(self.groups)}{marks}{source}"
        )

    def at(
        self, source: str, count: int, conditional: bool, unbounded: bool
    ) -> "Collective":
        """The same elsewhere in a step; its groups are not looked at again."""
        found = object.__new__(Collective)
        found.__dict__.update(
            self.__dict__,
            source=source,
            count=count,
            conditional=conditional,
            unbounded=unbounded,
        )
        return found

    @property
    def name(self) -> str:
        """Kind and reduction, as in `all_reduce(sum)`."""
        return f"{self.kind}({self.reduction})" if self.reduction else self.kind

    @property
    def total_bytes(self) -> int:
        """Result bytes on one device in one step."""
        return self.bytes * self.count

    @property
    def is_trivial(self) -> bool:
        """Whether nothing moves: every device talks to itself, or nothing is said."""
        if self.kind == "collective_permute":
            return not self.bytes or all(s == t for s, t in self.groups)
        return not self.bytes or all(len(group) == 1 for group in self.groups)


@dataclass(frozen=True)
class Surroundings:
    """What stands around a piece of program: how often it runs, and how sure that is.

    The fields are those of `Collective`.
    """

    count: int = 1
    conditional: bool = False
    unbounded: bool = False

    def in_loop(self, trip_count: int | None) -> "Surroundings":
        """Surrounds what stands in a loop; None is an unknown trip count."""
        if trip_count is None:
            return replace(self, unbounded=True)
        return replace(self, count=self.count * trip_count)

    def in_branch(self) -> "Surroundings":
        """Surrounds what stands in a branch of a conditional."""
        return replace(self, conditional=True)


@lru_cache
def canonical_groups(kind: str, groups: Groups) -> Groups:
    """Returns device groups in the one order in which equal ones compare equal.

    Raises:
      ValueError: those of a collective_permute are not pairs.
    """
    if kind == "collective_permute" and any(len(pair) != 2 for pair in groups):
        raise ValueError(
            "the `groups` of a collective_permute must be (source, target) pairs, "
            f"but got {format_groups(groups)}."
        )
    if kind == "all_reduce":
        return tuple(sorted(tuple(sorted(group)) for group in groups))
    return tuple(sorted(groups))


def format_groups(groups: Groups) -> str:
    """Prints groups as XLA does, `{{0,1},{2,3}}`, cut short after eight."""
    shown = ["{" + ",".join(map(str, group)) + "}" for group in groups[:8]]
    more = [f"... {len(groups) - 8} more"] if len(groups) > 8 else []
    return "{" + ",".join(shown + more) + "}"


def device_groups(
    groups: Iterable[Sequence[int]],
    *,
    kind: str,
    has_channel: bool,
    has_global_ids: bool,
    num_replicas: int,
    num_partitions: int,
) -> Groups:
    """Translates the ids written in a program to devices.

    A program has `num_replicas * num_partitions` devices (`jax.jit` makes one replica),
    and its channel and flag say whether ids count replicas, partitions or both; no
    groups means one group of all. Source: StableHLO specification, "Grouping".
    """
    written = [tuple(group) for group in groups]
    replicas, partitions = range(num_replicas), range(num_partitions)
    # Those that reduce or concatenate know two spellings more than those that move.
    if kind in ("all_reduce", "all_gather", "reduce_scatter"):
        if has_channel and has_global_ids:
            return tuple(written or [tuple(range(num_replicas * num_partitions))])
        if has_channel:
            return tuple(
                tuple(r * num_partitions + p for r in group for p in partitions)
                for group in written or [tuple(replicas)]
            )
    elif has_channel:
        return tuple(
            tuple(r * num_partitions + p for p in group)
            for group in written or [tuple(partitions)]
            for r in replicas
        )
    return tuple(
        tuple(r * num_partitions + p for r in group)
        for group in written or [tuple(replicas)]
        for p in partitions
    )


def array_bytes(
    element: str, dims: Iterable[int], *, is_complex: bool = False
) -> tuple[str, int]:
    """Returns numpy's dtype name and the bytes of an array in a program's text.

    Args:
      element: element type as MLIR or HLO spells it, such as `i32` or `s32`.
      dims: the array's shape.
      is_complex: `element` is that of the real and of the imaginary part.
    """
    dtype = _dtype_name(element)
    if is_complex:
        dtype = {"float32": "complex64", "float64": "complex128"}[dtype]
    return dtype, prod(dims) * jnp.dtype(dtype).itemsize


def _dtype_name(element: str) -> str:
    if element in ("i1", "pred"):
        return "bool"
    found = re.fullmatch(r"([a-z]+)(\d+)(\w*)", element.lower())
    prefix = _DTYPE_PREFIXES.get(found.group(1)) if found else None
    if found is None or prefix is None:
        raise ValueError(f"Cannot read the element type {element!r} of a collective.")
    variant = f"_{found.group(3)}" if found.group(3) else ""
    return f"{prefix}{found.group(2)}{variant}"


def num_operations(collectives: Iterable[Collective]) -> int:
    """Operations in a program's text, combined ones once."""
    return round(sum(1 / each.num_combined for each in collectives))
