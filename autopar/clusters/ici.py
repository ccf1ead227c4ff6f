"""TPU slices: the shape of their interconnect, ICI, and where a mesh's axes lie in it.

A slice is a box of chips, each joined to its neighbours along two or three axes; an
axis whose ends are joined, too, is a ring. Several slices are joined by the data-centre
network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SliceKind:
    """One generation of TPUs; see cloud.google.com/tpu/docs.

    Attributes:
      num_axes: ICI axes.
      chips: the largest number of chips along an axis.
      ring: an axis is a ring if its length is a multiple of this, and, where there are
        three axes, those of the others are, too: slices are then made of whole cubes.
      slice_bandwidth: bytes/s of one device to other slices.
      clock_rate: cycles a second: its peak rate over what its matrix units do in one.
      cores: devices of each chip.
    """

    num_axes: int
    chips: int
    ring: int
    slice_bandwidth: float
    clock_rate: float
    cores: int = 1


SLICES = {
    "v4": SliceKind(3, 16, 4, 6.25e9, 1.05e9),
    "v5e": SliceKind(2, 16, 16, 3.125e9, 1.5e9),
    "v5p": SliceKind(3, 24, 4, 6.25e9, 1.75e9),
    "v6e": SliceKind(2, 16, 16, 12.5e9, 1.75e9),
    "tpu7x": SliceKind(3, 24, 4, 6.25e9, 2.2e9, cores=2),
}
# Devices of a chip are joined about six times as quickly as chips along an axis.
_WITHIN_CHIP = 6.0


def standard_shape(kind: str, num_devices: int) -> tuple[int, ...]:
    """The shape in which a slice of so many devices is offered; empty if it is not."""
    if kind not in SLICES:
        return ()
    slice_kind = SLICES[kind]
    chips, left = divmod(num_devices, slice_kind.cores)
    if left or chips < 1 or chips & (chips - 1):
        return ()
    shape = [1] * slice_kind.num_axes
    for number in range(chips.bit_length() - 1):
        shape[number % len(shape)] *= 2
    if max(shape) > slice_kind.chips:
        return ()
    return tuple(sorted(shape, key=lambda length: (length == 1, length)))


def check_shape(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a slice of a kind, one of a chip too few axes filled up.

    Raises:
      ValueError: the kind has no such slices.
    """
    slice_kind = SLICES.get(kind)
    if slice_kind is None:
        raise ValueError(
            f"A shape of chips names a slice of {', '.join(SLICES)}, but got a shape "
            f"for {kind!r}; write hosts x devices x kind, such as '8x8x{kind}'."
        )
    most, axes = slice_kind.chips, slice_kind.num_axes
    filled = (*shape, *(1,) * (axes - len(shape)))
    if len(filled) > axes or not all(1 <= length <= most for length in filled):
        example = "x".join(map(str, standard_shape(kind, 8 * slice_kind.cores)))
        raise ValueError(
            f"A slice of {kind} has {axes} axes of 1 to {most} chips, but got "
            f"{'x'.join(map(str, shape))!r}; use for example '{kind}:{example}'."
        )
    return filled


@dataclass(frozen=True)
class SliceShape:
    """The chips of one slice along each ICI axis, and how many devices a chip has."""

    kind: str
    chips: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Devices along each axis; those of a chip are the last one."""
        return (*self.chips, SLICES[self.kind].cores)

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.chips))}"

    @property
    def speeds(self) -> tuple[float, ...]:
        """What a device sends along each axis, beside a ring along one of them."""
        ring = SLICES[self.kind].ring
        is_ring = [length % ring == 0 for length in self.chips]
        if len(self.chips) > 2 and not all(is_ring):
            is_ring = [False] * len(self.chips)
        return (*(1.0 if each else 0.5 for each in is_ring), _WITHIN_CHIP)

    def places(self, sizes: Sequence[int]) -> np.ndarray:
        """Where the devices of a mesh lie: coordinates [device, axis], row-major.

        `sizes` are those of a mesh of one slice, or of several, one after the other.
        """
        return _places(self.lengths, tuple(sizes))

    def speeds_in(self, group: np.ndarray) -> tuple[float, float]:
        """What a device sends in a ring of `group`, beside a ring along one axis, and
        in an exchange of all with all.

        `group` [devices, axes] are the coordinates of the devices. Groups that are no
        boxes get one line.
        """
        if len(group) == 1:
            return 1.0, 1.0
        ring, exchange = 0.0, math.inf
        numbers = [np.unique(column) for column in group.T]
        if math.prod(map(len, numbers)) != len(group):
            return min(self.speeds) / len(group), min(self.speeds) / len(group)
        for here, length, speed in zip(numbers, self.lengths, self.speeds, strict=True):
            if len(here) == 1:
                continue
            apart = int(here[1] - here[0])  # so many groups share the links
            reached = speed if len(here) * apart == length else min(speed, 0.5)
            ring += reached / apart
            exchange = min(exchange, reached / apart * min(4 / len(here), 1.0))
        return ring, exchange

    def laid_out(self, devices: Sequence[Any], sizes: Sequence[int]) -> Sequence[Any]:
        """Devices of a mesh in its order, if they are TPUs in slices of this shape."""
        number, inside = math.prod(sizes), self.places(sizes)
        at: dict[tuple[Any, ...], Any] = {
            (getattr(d, "slice_index", None) or 0, *d.coords, d.core_on_chip): d
            for d in devices
            if hasattr(d, "coords")
        }
        fill = (0,) * (3 - len(self.chips))  # JAX gives three coordinates
        slices = sorted({place[0] for place in at})
        found = []
        for device in range(number if len(at) == len(devices) else 0):
            *chip, core = inside[device % self.size].tolist()
            which = device // self.size
            where = (slices[which], *chip, *fill, core) if which < len(slices) else ()
            found.append(at.get(where))
        return found if found and None not in found else devices[:number]


@cache
def _places(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """The order of axes in which most mesh axes lie along few ICI axes, next to it."""
    size = math.prod(lengths)
    grid = np.stack(np.unravel_index(np.arange(size), lengths), axis=-1)
    number = math.prod(sizes)
    if number % size:
        return grid
    inside = _inside(sizes, size)
    last = len(lengths) - 1

    def cost(order: tuple[int, ...]) -> int:
        """How many boundaries of mesh axes are none of ICI axes."""
        ends = set(np.cumprod([1, *(lengths[axis] for axis in reversed(order))]))
        return sum(int(end) not in ends for end in np.cumprod([1, *reversed(inside)]))

    orders = ((*order, last) for order in itertools.permutations(range(last)))
    best = min(orders, key=cost)
    return grid.reshape(*lengths, -1).transpose(*best, -1).reshape(size, -1)


def _inside(sizes: Sequence[int], size: int) -> list[int]:
    """The parts of mesh axes that lie in one slice of `size` devices."""
    inside: list[int] = []
    for each in reversed(sizes):
        part = math.gcd(each, size)
        inside.insert(0, part)
        size //= part
    return inside
