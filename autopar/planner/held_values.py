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

from ..costs.kernels import KernelBlock, Value, ValueColumns
from .sharding_problem import ShardingProblem

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class HeldValues:
    """The values of a block by who holds them.

    [values]: the vertex (-1 for none), whether it is a copy beside all relays, the
    positions at which it is in memory. [lasting]: the relay of what lies outside, the
    first position and the last at which it is read.
    """

    vertex: np.ndarray
    is_beside: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    read: np.ndarray
    first_read: np.ndarray
    last_read: np.ndarray


@dataclass(frozen=True, eq=False)
class Reads:
    """Which kernels read which tensors: int [reads] each."""

    tensor: np.ndarray
    kernel: np.ndarray

    def spans(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[tensors] each that is read, and where it is first and last.

        `position` [kernels] is where each of them runs.
        """
        read, number = np.unique(self.tensor, return_inverse=True)
        at, number = position[self.kernel], number.reshape(-1)
        first, last = np.full(len(read), len(position)), np.full(len(read), -1)
        np.minimum.at(first, number, at)
        np.maximum.at(last, number, at)
        return read, first, last


def lasting_reads(
    block: KernelBlock,
    tensor: np.ndarray,
    relay_bytes: np.ndarray,
    reads_less: np.ndarray,
) -> Reads:
    """Where a block reads what a relay of a lasting tensor holds.

    What replaces it needs no copy, nor does what reads or slices out less of it.

    Args:
      block: the kernels.
      tensor: int [values] of the block.
      relay_bytes: [tensors] as from `bytes_of_relays`.
      reads_less: as from `reading_less`.
    """
    columns = block.columns
    replaced_by = np.full(len(tensor), -1)
    for old, new in block.replaced:
        replaced_by[old] = block.maker[new]
    held = relay_bytes[tensor]
    is_part = _bytes_of(block.values) < held * (1 - _ROUNDING)
    starts = columns.write_start
    is_slice = np.zeros(len(columns.operator), bool)
    is_copying = np.flatnonzero((columns.operator < 0) & (np.diff(starts) > 0))
    is_slice[is_copying] = is_part[columns.writes[starts[is_copying]]]
    is_reading = held[columns.reads] >= 0
    is_reading &= replaced_by[columns.reads] != columns.readers
    keys = columns.operator[columns.readers] * len(relay_bytes) + tensor[columns.reads]
    is_reading &= ~np.isin(keys, reads_less) & ~is_slice[columns.readers]
    found = np.flatnonzero(is_reading)
    return Reads(tensor[columns.reads[found]], columns.readers[found])


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
    """Operators that read less of a lasting tensor than its relay holds.

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
    keys = problem.graph.columns.index[row[rows]] * len(relay_bytes) + tensor
    return np.setdiff1d(keys[is_less], keys[~is_less])


def tensors_of(values: Sequence[Value]) -> tuple[np.ndarray, np.ndarray]:
    """[values] the tensor of each, and whether it is a copy."""
    if isinstance(values, ValueColumns):
        return values.tensor, values.is_copy
    tensor = np.array([value.tensor for value in values], np.intp)
    return tensor, np.array([value.is_copy for value in values], bool)


def _bytes_of(values: Sequence[Value]) -> np.ndarray:
    """[values] the bytes of each on one device."""
    if isinstance(values, ValueColumns):
        return values.bytes
    return np.array([value.bytes for value in values], np.int64)
