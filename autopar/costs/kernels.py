"""What a compiled program runs, block by block: kernels over values in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.solver.made_when_read import MadeWhenRead

from ..sharding.spec import REPLICATED, Spec, dims_of

Specs = np.ndarray | Sequence[Spec] | Spec
MANY_READS = 16
MOST_BEFORE = 32  # reads that come before what is included


class Value(NamedTuple):
    """A tensor in one spec, as one device holds it.

    `is_copy`: it is not made in that spec. `is_outside`: its memory is not this block's
    but an argument's or that of a loop's operand.
    """

    tensor: int
    spec: Spec
    bytes: int
    is_copy: bool
    is_outside: bool = False


@dataclass(frozen=True, eq=False)
class ValueColumns(MadeWhenRead[Value]):
    """Values as arrays [values]; `spec` are places in `specs`, -1 for none."""

    tensor: np.ndarray
    spec: np.ndarray
    bytes: np.ndarray
    is_copy: np.ndarray
    is_outside: np.ndarray
    specs: Sequence[Spec]

    def __len__(self) -> int:
        return len(self.tensor)

    def with_copies(
        self,
        of: Sequence[int] | np.ndarray,
        *,
        tensor: Sequence[int] | np.ndarray | None = None,
        spec: Sequence[int] | np.ndarray | None = None,
        times_wider: int = 1,
    ) -> ValueColumns:
        """Values with copies of some at the end, in the block's own memory."""
        chosen, count = np.asarray(of, np.intp), len(of)
        return ValueColumns(
            np.append(self.tensor, self.tensor[chosen] if tensor is None else tensor),
            np.append(self.spec, self.spec[chosen] if spec is None else spec),
            np.append(self.bytes, self.bytes[chosen] * times_wider),
            np.append(self.is_copy, np.ones(count, bool)),
            np.append(self.is_outside, np.zeros(count, bool)),
            self.specs,
        )

    def item(self, index: int) -> Value:
        """The value at an index."""
        spec = int(self.spec[index])
        return Value(
            int(self.tensor[index]),
            () if spec < 0 else self.specs[spec],
            int(self.bytes[index]),
            bool(self.is_copy[index]),
            bool(self.is_outside[index]),
        )


class Kernel(NamedTuple):
    """One kernel: the values it reads from memory, and those it writes.

    `operator` is None for what converts or stores. `inner_bytes` is what its bodies (or
    its shards with their halos) hold besides. `is_elementwise`: it may write over what
    it reads. `carries` pairs what a loop reads with what it returns in its place.
    `is_send`: it moves a result to the host's memory.
    """

    operator: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inner_bytes: int = 0
    is_elementwise: bool = False
    carries: tuple[tuple[int, int], ...] = ()
    is_send: bool = False


@dataclass(frozen=True, eq=False)
class KernelColumns(MadeWhenRead[Kernel]):
    """Kernels as arrays [kernels]; `operator` is -1 for none.

    Kernel k reads the values `reads[read_start[k] : read_start[k + 1]]`, and writes
    those of `writes` likewise. `carries` is by kernel.
    """

    operator: np.ndarray
    read_start: np.ndarray
    reads: np.ndarray
    write_start: np.ndarray
    writes: np.ndarray
    inner_bytes: np.ndarray
    is_elementwise: np.ndarray
    is_send: np.ndarray
    carries: Mapping[int, tuple[tuple[int, int], ...]]

    @classmethod
    def of(cls, kernels: Sequence[Kernel]) -> KernelColumns:
        """The columns of kernels."""
        if isinstance(kernels, KernelColumns):
            return kernels
        return cls(
            np.array([-1 if k.operator is None else k.operator for k in kernels]),
            _starts([len(kernel.reads) for kernel in kernels]),
            np.array([value for k in kernels for value in k.reads], np.intp),
            _starts([len(kernel.writes) for kernel in kernels]),
            np.array([value for k in kernels for value in k.writes], np.intp),
            np.array([kernel.inner_bytes for kernel in kernels], np.int64),
            np.array([kernel.is_elementwise for kernel in kernels], bool),
            np.array([kernel.is_send for kernel in kernels], bool),
            {k: kernel.carries for k, kernel in enumerate(kernels) if kernel.carries},
        )

    def __len__(self) -> int:
        return len(self.operator)

    def item(self, index: int) -> Kernel:
        """The kernel at an index."""
        operator = int(self.operator[index])
        reads = self.reads[slice(*self.read_start[index : index + 2])]
        writes = self.writes[slice(*self.write_start[index : index + 2])]
        return Kernel(
            None if operator < 0 else operator,
            tuple(reads.tolist()),
            tuple(writes.tolist()),
            int(self.inner_bytes[index]),
            bool(self.is_elementwise[index]),
            self.carries.get(index, ()),
            bool(self.is_send[index]),
        )

    @cached_property
    def includes(self) -> dict[int, tuple[int, int]]:
        """By kernel with many reads, an earlier one, and how many reads come first.

        After these it reads all that the earlier one does, in the same order, and then
        others. So chains of kernels that each do again all that came before are short.
        """
        found, longest = dict[int, tuple[int, int]](), dict[int, int]()
        starts = self.read_start.tolist()
        for k in np.flatnonzero(np.diff(self.read_start) > MANY_READS).tolist():
            own, count = (
                self.reads[starts[k] : starts[k + 1]],
                starts[k + 1] - starts[k],
            )
            for place, value in enumerate(own[:MOST_BEFORE].tolist()):
                other = longest.get(value, k)
                low, high = starts[other], starts[other + 1]
                theirs, same = self.reads[low:high], own[place : place + high - low]
                if other != k and len(same) == len(theirs) and (same == theirs).all():
                    found[k] = other, place
                    break
            other = longest.setdefault(int(own[0]), k)
            if count > starts[other + 1] - starts[other] or k not in found:
                longest[int(own[0])] = k
        return found

    @cached_property
    def own_reads(self) -> tuple[np.ndarray, np.ndarray]:
        """(kernel, value) of `reads`, without those of what kernels include."""
        starts, is_own = self.read_start.tolist(), np.ones(len(self.reads), bool)
        for k, (other, place) in self.includes.items():
            first = starts[k] + place
            is_own[first : first + starts[other + 1] - starts[other]] = False
        return self.readers[is_own], self.reads[is_own]

    @cached_property
    def readers(self) -> np.ndarray:
        """The kernel of each entry of `reads`."""
        return np.repeat(np.arange(len(self)), np.diff(self.read_start))

    @cached_property
    def writers(self) -> np.ndarray:
        """The kernel of each entry of `writes`."""
        return np.repeat(np.arange(len(self)), np.diff(self.write_start))


@dataclass(frozen=True, eq=False)
class KernelBlock:
    """The kernels of one block in traced order, over `values`.

    `kept` are the values that the block returns, in order. `replaced` pairs an input
    with the value that is returned in its memory. `passed` has, for each value that
    stands for what a barrier lets pass, what that is: who reads it behind the barrier
    reads both. `flat` values are written in other dims than their readers' results, so
    elementwise kernels do not write over them. `wide` has, for each copy in a wider
    dtype, the value that it is a copy of, `relaid` the gathered value of which each is
    a copy that lies as products read it. `exchanged` has, for each value that an
    all_to_all makes, of how many parts. `is_alone`: it is of one accelerator's program.
    """

    values: Sequence[Value]
    kernels: Sequence[Kernel]
    kept: tuple[int, ...]
    replaced: tuple[tuple[int, int], ...]
    passed: Mapping[int, int] = field(default_factory=dict[int, int])
    flat: frozenset[int] = frozenset()
    wide: Mapping[int, int] = field(default_factory=dict[int, int])
    relaid: Mapping[int, int] = field(default_factory=dict[int, int])
    exchanged: Mapping[int, int] = field(default_factory=dict[int, int])
    is_alone: bool = False

    @cached_property
    def columns(self) -> KernelColumns:
        """The kernels as arrays."""
        return KernelColumns.of(self.kernels)

    @cached_property
    def replacements(self) -> np.ndarray:
        """`replaced` as an array [2, pairs]."""
        return np.array(self.replaced, np.intp).reshape(-1, 2).T

    @cached_property
    def maker(self) -> np.ndarray:
        """[values] the kernel that writes each, or -1."""
        maker = np.full(len(self.values), -1)
        maker[self.columns.writes] = self.columns.writers
        return maker

    @cached_property
    def sizes(self) -> np.ndarray:
        """[values] bytes."""
        if isinstance(self.values, ValueColumns):
            return self.values.bytes
        return np.array([value.bytes for value in self.values], np.int64)

    @cached_property
    def is_outside(self) -> np.ndarray:
        """[values] whose memory is not this block's."""
        if isinstance(self.values, ValueColumns):
            return self.values.is_outside
        return np.array([value.is_outside for value in self.values], bool)


@dataclass(frozen=True, eq=False)
class Border:
    """How a block shares memory with its owner, in positions of inputs and outputs.

    `replaced` pairs an input with the output that is returned in its memory. `sliced`
    inputs are cut out of something larger, `stored` outputs put into something larger.
    `fetched` inputs come from the host's memory, `sent` outputs go there.
    """

    replaced: tuple[tuple[int, int], ...] = ()
    sliced: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()
    fetched: frozenset[int] = frozenset()
    sent: frozenset[int] = frozenset()

    def is_outside(self, count: int) -> np.ndarray:
        """Bool [count], inputs whose memory is the owner's."""
        inside = self.sliced | self.fetched
        return np.array([place not in inside for place in range(count)], bool)


def is_cut_out(sources: Specs, targets: Specs) -> np.ndarray:
    """Whether a device cuts its part of a target out of its own of the source.

    bool [...] of specs [..., axes].
    """
    before = np.asarray(sources)
    return ((before == np.asarray(targets)) | (before == REPLICATED)).all(axis=-1)


def turns(sources: Specs, targets: Specs) -> np.ndarray:
    """Whether a collective cuts along a dim that is not the major one: bool [...].

    Its operand is then copied, that dim first. Both are specs [..., axes].
    """
    before, after = dims_of(np.asarray(sources)), dims_of(np.asarray(targets))
    is_cut = (after > 0) & (before != after) & (before != REPLICATED)
    return is_cut.any(axis=-1)


def gathers_minor(sources: Specs, targets: Specs) -> np.ndarray:
    """Whether a collective gathers along a dim that is not the major one: bool [...].

    Its result lies with that dim first; a loop or a product reads a copy.
    """
    before, after = dims_of(np.asarray(sources)), np.asarray(targets)
    return ((before > 0) & (after == REPLICATED)).any(axis=-1)


def exchanges(sources: Specs, targets: Specs) -> np.ndarray:
    """Along which mesh axes a collective exchanges shards: bool [..., axes]."""
    before, after = dims_of(np.asarray(sources)), dims_of(np.asarray(targets))
    return (before >= 0) & (after >= 0) & (before != after)


def _starts(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(counts, np.intp))])
