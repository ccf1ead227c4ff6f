"""Specs and device groups as the short texts that plan files are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from ..sharding.collective import Groups, canonical_groups
from ..sharding.mesh import MeshShape
from ..sharding.spec import (
    MAX,
    MIN,
    REPLICATED,
    SUM,
    TURN,
    Spec,
    axes_of_dim,
    dim_of,
    with_axes,
)
from .record import Record

_WORDS = {SUM: "sum", MAX: "max", MIN: "min"}
_STATES = {word: state for state, word in _WORDS.items()}


@dataclass(frozen=True)
class SpecText:
    """Writes and reads the specs and device groups of one mesh.

    `data:0 model:sum` says that `data` splits dim 0 and `model` owes a sum; an axis
    that is not named holds replicas, and `-` says that all do. Of several axes of one
    dim the first named is the most major.
    """

    mesh: MeshShape

    def write(self, spec: Spec) -> str:
        order = list(range(len(spec)))
        if max(spec) >= TURN:  # the axes of a dim change places
            for dim in {dim_of(state) for state in spec if state >= 0}:
                axes = axes_of_dim(spec, dim)
                for place, axis in zip(sorted(axes), axes, strict=True):
                    order[place] = axis
        parts = [
            f"{self.mesh.axis_names[axis]}:{_WORDS.get(spec[axis], dim_of(spec[axis]))}"
            for axis in order
            if spec[axis] != REPLICATED
        ]
        return " ".join(parts) or "-"

    @cached_property
    def _state(self) -> re.Pattern[str]:
        # By the mesh's own names, as these may hold spaces and colons.
        names = sorted(map(re.escape, self.mesh.axis_names), key=len, reverse=True)
        return re.compile(rf"({'|'.join(names)}):(\d+|{'|'.join(_STATES)})(?:\s+|$)")

    def read(self, record: Record) -> Spec:
        text = record.text().strip()
        states = [REPLICATED] * self.mesh.num_axes
        axes_by_dim: dict[int, list[int]] = {}
        position = 0
        while text != "-" and position < max(len(text), 1):
            found = self._state.match(text, position)
            if found is None:
                axes = ", ".join(self.mesh.axis_names)
                record.fail(
                    "must be `-` or pairs such as `data:0 model:sum` with axes of the "
                    f"mesh ({axes}) and a dim, sum, max or min, but got {text!r}"
                )
            name, state = found.groups()
            axis = self.mesh.index_of(name)
            if states[axis] != REPLICATED:
                record.fail(f"names the axis {name!r} twice: {text!r}")
            states[axis] = _STATES[state] if state in _STATES else int(state)
            if states[axis] >= TURN:
                record.fail(f"names dim {state}, and no tensor has so many: {text!r}")
            if states[axis] >= 0:
                axes_by_dim.setdefault(states[axis], []).append(axis)
            position = found.end()
        spec = tuple(states)
        for dim, ordered in axes_by_dim.items():
            spec = with_axes(spec, dim, ordered)
        return spec

    @cached_property
    def _axes_by_groups(self) -> dict[Groups, tuple[str, ...]]:
        count, names = self.mesh.num_axes, self.mesh.axis_names
        ordered = [
            o for size in range(count + 1) for o in permutations(range(count), size)
        ]
        return {  # of equal groups the fewest axes stay, and those in mesh order
            self.mesh.ordered_groups(axes): tuple(names[axis] for axis in axes)
            for axes in reversed(ordered)
        }

    def write_groups(self, groups: Groups, kind: str) -> str | list[list[int]]:
        """Names of axes where they say it all, else the device numbers.

        Members of a group are in the order of its axes.
        """
        is_permute = kind == "collective_permute"
        axes = None if is_permute else self._axes_by_groups.get(groups)
        return [list(group) for group in groups] if axes is None else "+".join(axes)

    def read_groups(self, record: Record, kind: str) -> Groups:
        if not isinstance(record.value, str):
            size = self.mesh.size
            return tuple(group.integers(below=size) for group in record.items())
        for groups, axes in self._axes_by_groups.items():
            if "+".join(axes) == record.value:
                return canonical_groups(kind, groups)
        return record.fail(
            f"must be axes of the mesh {self.mesh} joined by `+`, or lists of device "
            f"numbers, but got {record.value!r}"
        )
