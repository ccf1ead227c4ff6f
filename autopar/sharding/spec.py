"""How one tensor lies on a mesh: for every mesh axis one state, a dim or a word.

A spec is a tuple with one integer per mesh axis, in mesh order:

    d >= 0       the axis splits dim d
    REPLICATED   every shard along the axis holds the same values
    SUM/MAX/MIN  *pending*: the tensor is that reduction of the shards along the axis

Several axes that split one dim do so in mesh order, the first the most major. Where the
order is another, it is cut into *turns*, each in mesh order and as long as can be, and
axes of turn t have the state `d + t * TURN`: on axes x and y `P(("y", "x"))` is
`(TURN, 0)`. This is what `jax.sharding.PartitionSpec` says, seen from the mesh, plus
pending reductions; equal layouts are equal specs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
from jax.sharding import PartitionSpec

State = int
Spec = tuple[State, ...]

REPLICATED: State = -1
SUM: State = -2
MAX: State = -3
MIN: State = -4
TURN: State = 256  # no tensor has as many dims

_STATE_WORDS = {REPLICATED: "", SUM: "sum", MAX: "max", MIN: "min"}


def replicated(num_axes: int) -> Spec:
    """The spec under which every device holds the whole tensor."""
    return (REPLICATED,) * num_axes


def is_pending(spec: Spec) -> bool:
    """Whether any axis still owes a reduction."""
    return any(state < REPLICATED for state in spec)


def pending_axes(spec: Spec) -> tuple[int, ...]:
    """The axes that owe a reduction."""
    return tuple(axis for axis, state in enumerate(spec) if state < REPLICATED)


def dim_of(state: State) -> int:
    """The dim that a state splits; one that splits none is itself."""
    return state % TURN if state >= TURN else state


def dims_of(specs: np.ndarray) -> np.ndarray:
    """`dim_of` for each of `specs` [..., axes]."""
    return np.where(specs >= TURN, specs % TURN, specs)


def axes_of_dim(spec: Spec, dim: int) -> tuple[int, ...]:
    """The mesh axes that split `dim`, most major first."""
    axes = [axis for axis, state in enumerate(spec) if dim_of(state) == dim]
    return tuple(sorted(axes, key=spec.__getitem__))


def turns_of(axes: Sequence[int]) -> tuple[int, ...]:
    """The turn of each of the axes of one dim, given most major first."""
    turns = [0] * len(axes)
    for i in range(1, len(axes)):
        turns[i] = turns[i - 1] + (axes[i] < axes[i - 1])
    return tuple(turns)


def with_axes(spec: Spec, dim: int, axes: Sequence[int]) -> Spec:
    """The spec with `dim` split by `axes`, most major first, that split nothing."""
    states = list(spec)
    for axis, turn in zip(axes, turns_of(axes), strict=True):
        states[axis] = dim + turn * TURN
    return tuple(states)


def num_shards(spec: Spec, sizes: Sequence[int]) -> int:
    """Into how many distinct pieces the tensor is cut (pending axes cut nothing)."""
    return prod(sizes[axis] for axis, state in enumerate(spec) if state >= 0)


def local_shape(
    shape: Sequence[int], spec: Spec, sizes: Sequence[int]
) -> tuple[int, ...]:
    """The shape of one shard; every split dim must divide."""
    local = list(shape)
    for axis, state in enumerate(spec):
        if state >= 0:
            dim = dim_of(state)
            assert local[dim] % sizes[axis] == 0, (shape, spec, sizes)
            local[dim] //= sizes[axis]
    return tuple(local)


def is_legal(shape: Sequence[int], spec: Spec, sizes: Sequence[int]) -> bool:
    """Whether every dim is divisible by the axes that split it."""
    counts = [1] * len(shape)
    for axis, state in enumerate(spec):
        dim = dim_of(state)
        if dim >= len(shape):
            return False
        if dim >= 0:
            counts[dim] *= sizes[axis]
    return all(
        count == 1 or (size % count == 0 and size >= count)
        for size, count in zip(shape, counts, strict=True)
    )


def to_partition_spec(spec: Spec, rank: int, names: Sequence[str]) -> PartitionSpec:
    """The `PartitionSpec` that says the same; pending axes are left out."""
    entries: list[object] = []
    for dim in range(rank):
        axes = tuple(names[axis] for axis in axes_of_dim(spec, dim))
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def from_partition_spec(value: PartitionSpec, names: Sequence[str]) -> Spec:
    """The spec that a `PartitionSpec` says.

    Raises:
      ValueError: it names an axis that is none of `names`, or one twice.
    """
    spec = replicated(len(names))
    for dim, entry in enumerate(value):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        indices: list[int] = []
        for name in axes:
            if name not in names:
                raise ValueError(
                    f"A PartitionSpec may only name axes of the mesh {tuple(names)}, "
                    f"but got {name!r} in {value}; use one of them, or name {name!r} "
                    f"in `mesh`."
                )
            index = list(names).index(name)
            if spec[index] != REPLICATED or index in indices:
                raise ValueError(
                    f"A mesh axis may split one dim only, but {name!r} appears "
                    f"twice in {value}; leave it out of one of the two."
                )
            indices.append(index)
        spec = with_axes(spec, dim, indices)
    return spec


def format_spec(spec: Spec, rank: int, names: Sequence[str]) -> str:
    """One short line: `[data, model+pipe, -]`, and `sum(model)` for pending axes."""
    dims = []
    for dim in range(rank):
        axes = axes_of_dim(spec, dim)
        dims.append("+".join(names[axis] for axis in axes) or "-")
    pending = [
        f"{_STATE_WORDS[state]}({names[axis]})"
        for axis, state in enumerate(spec)
        if state < REPLICATED
    ]
    return " ".join([f"[{', '.join(dims)}]", *pending])


@lru_cache(maxsize=1 << 12)
def is_cut_out(source: Spec, target: Spec) -> bool:
    """Whether a device cuts its part of a target out of its own of the source."""
    pairs = zip(source, target, strict=True)
    return all(before in (after, REPLICATED) for before, after in pairs)
