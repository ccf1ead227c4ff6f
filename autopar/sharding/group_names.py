"""Prints the device groups of a collective as the mesh axes it runs over."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations

from autopar.sharding.collective import Groups, format_groups
from autopar.sharding.mesh import MeshShape

MOST_MEMBERS = 32  # of groups that are written out


@dataclass(frozen=True)
class GroupNames:
    """Names for groups of `num_devices` devices, with axis names if a mesh is given.

    Raises:
      ValueError: if the mesh has another number of devices.
    """

    num_devices: int
    mesh: MeshShape | None = None

    def __post_init__(self) -> None:
        if self.mesh and self.mesh.size != self.num_devices:
            raise ValueError(
                f"the mesh must have {self.num_devices} devices, but got {self.mesh} "
                f"with {self.mesh.size}; pass the mesh that the plan was made for."
            )

    def name(self, kind: str, groups: Groups) -> str:
        """Returns `model`, `data,model` or, if no axes fit, the groups, in short if
        they are long.

        Axes are in the order in which members of a group follow each other.
        """
        is_permute = kind == "collective_permute"
        found = self._found.get((is_permute, groups))
        if found is None:
            found = self._found[is_permute, groups] = self._name(is_permute, groups)
        return found

    @cached_property
    def _found(self) -> dict[tuple[bool, Groups], str]:
        return {}

    def _name(self, is_permute: bool, groups: Groups) -> str:
        if is_permute:
            for axes, members in self._members.items():
                if all(target in members.get(source, ()) for source, target in groups):
                    return axes
            return format_groups(groups)
        members = _by_member(groups)
        axes = next((a for a, m in self._members.items() if m == members), None)
        if axes is None:
            return _even_steps(groups) or format_groups(groups)
        if all(list(group) == sorted(group) for group in groups):
            return axes
        return self._in_order(axes, groups) or f"{axes} in the order {groups[0]}"

    def _in_order(self, axes: str, groups: Groups) -> str:
        """The axes in the order that members of the groups are in; empty if in none."""
        names = self.mesh.axis_names if self.mesh else ()
        chosen = [i for i, name in enumerate(names) if name in axes.split(",")]
        for order in permutations(chosen):
            if self.mesh and set(self.mesh.ordered_groups(order)) == set(groups):
                return ",".join(names[axis] for axis in order)
        return ""

    @cached_property
    def _members(self) -> dict[str, dict[int, frozenset[int]]]:
        """For each set of axes, fewest first, whom each device talks to."""
        if self.mesh is None:
            everyone = frozenset(range(self.num_devices))
            return {f"all {self.num_devices}": dict.fromkeys(everyone, everyone)}
        named = {}
        for axes in _subsets(self.mesh):
            # Axes of size 1 add nothing: the fewest axes name the groups.
            members = _by_member(self.mesh.groups(axes))
            if members not in named.values():
                named[",".join(axes)] = members
        return named


def _even_steps(groups: Groups) -> str:
    """Long groups in short, `8 groups of 64, 1 apart`; empty if they are not even."""
    size, step = len(groups[0]), groups[0][1] - groups[0][0] if groups[0][1:] else 0
    if len(groups) * size <= MOST_MEMBERS or step < 1:
        return ""
    firsts = (j // step * step * size + j % step for j in range(len(groups)))
    even = {tuple(range(first, first + step * size, step)) for first in firsts}
    if even != set(map(tuple, groups)):
        return ""
    return f"{len(groups)} groups of {size}, {step} apart"


def _by_member(groups: Groups) -> dict[int, frozenset[int]]:
    return {device: frozenset(group) for group in groups for device in group}


def _subsets(mesh: MeshShape) -> Iterator[tuple[str, ...]]:
    for num_axes in range(1, mesh.num_axes + 1):
        yield from combinations(mesh.axis_names, num_axes)
