"""Which vertices hold the values of a block, and when relays of what lasts would.

An argument that a plan reads as it lies is copied under other plans, and the copy is
held from the first to the last that reads the relay. What reads less than the relay
holds (the slice that an optimizer updates) needs no copy: where the tensor lies as
split as that, it is read as it lies. So the copy is dropped before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..costs.kernels import Value, ValueColumns
from .sharding_problem import ShardingProblem

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class HeldValues:
    """The values of a block by who holds them.

    [values]: the vertex (-1 for none), whether it is a copy beside all relays, whether
    one in a wider dtype, the positions at which it is in memory. [lasting]: the relay
    of what lies outside, the first position and the last at which it is read.
    """

    vertex: np.ndarray
    is_beside: np.ndarray
    is_wide: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    read: np.ndarray
    first_read: np.ndarray
    last_read: np.ndarray


def bytes_of_relays(
    problem: ShardingProblem, lasting: Iterable[int], choices: Sequence[int]
) -> np.ndarray:
    """[tensors + 1] what relays hold where they copy what lasts; -1 for other tensors.

    `choices` are an assignment of the problem; the last stands for no tensor.
    """
    tensors = problem.graph.tensors
    found = np.full(len(tensors) + 1, -1.0)
    for tensor in lasting:
        relay = problem.relays[tensor]
        part = problem.vertices[relay].writes[0].choices.fractions[choices[relay]]
        found[tensor] = part * tensors[tensor].type.bytes
    return found


def reading_less(
    problem: ShardingProblem, choices: Sequence[int], relay_bytes: np.ndarray
) -> np.ndarray:
    """Operators that read less of a lasting tensor than its relay holds, or no relay.

    As keys: the index of the operator times the length of `relay_bytes`, and the
    tensor.
    """
    columns, reads = problem.columns, problem.columns.reads
    row = columns.row[reads.vertex]
    is_reading = (relay_bytes[reads.tensor] >= 0) & (row >= 0)
    rows = np.flatnonzero(is_reading)
    chosen = np.asarray(choices, np.intp)[reads.vertex]
    held = np.zeros(len(reads.tensor))
    for number in np.unique(reads.choices[rows]).tolist():
        members = rows[reads.choices[rows] == number]
        held[members] = columns.choices[number].fractions[chosen[members]]
    tensor, tensors = reads.tensor[rows], problem.graph.tensors
    size = np.array([tensors[t].type.bytes for t in tensor.tolist()], np.float64)
    is_less = held[rows] * size < relay_bytes[tensor] * (1 - _ROUNDING)
    is_less |= problem.is_late[rows]
    keys = problem.graph.columns.index[row[rows]] * len(relay_bytes) + tensor
    return np.setdiff1d(keys[is_less], keys[~is_less])


def tensors_of(values: Sequence[Value]) -> tuple[np.ndarray, np.ndarray]:
    """[values] the tensor of each, and whether it is a copy."""
    if isinstance(values, ValueColumns):
        return values.tensor, values.is_copy
    tensor = np.array([value.tensor for value in values], np.intp)
    return tensor, np.array([value.is_copy for value in values], bool)
