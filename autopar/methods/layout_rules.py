"""Layout rules as in Mesh-TensorFlow: names for dims, and a mesh axis for each name.

    autopar.LayoutRules("batch:rows;hidden:cols", {"x": "batch io", "w": "io hidden"})

Names are given to dims of arguments and spread to every tensor that shares the dims
(`dim_names.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from ..graph.op_graph import OpGraph
from ..option_values import MicrobatchSemantics
from ..sharding.mesh import MeshShape
from ..sharding.pins import keys_of_arguments
from ..sharding.spec import REPLICATED, Spec, replicated, with_axes
from .dim_names import Dim, DimTies, NamedDim
from .restrictions import NOT_SPLIT, Demand, Restriction

BATCH = "batch"
AUTO = "auto"
_SEPARATORS = re.compile(r"[;,.\s]+")


@dataclass(frozen=True)
class LayoutRules:
    """A mesh axis for each named dim, in whatever tensor the dim is.

    As `method=` of `parallelize` the rules are all there is, as in Mesh-TensorFlow: a
    dim without a rule is whole, and work may be repeated on devices. As `rules=` they
    fix the dims that they name, and all others are left to the solver.

    As `method=`, `"auto"` asks for the layout that holds the least memory, as
    `auto_mtf.layout` does: each named dim on one mesh axis or none, and of layouts that
    hold as much the one that splits the most dims (`planner/auto_layout.py`). Without
    `names`, every dim of the arguments is free to be split.

    Args:
      rules: `"auto"`, or pairs such as `"batch:rows;hidden:cols"`, separated by any of
        `;` `,` `.` and space. Names may share an axis where no tensor has both; a name
        that is given several axes is split by them together, the first the most major.
      names: the names of an argument's dims, by path or regular expression as in
        `pins`: `{"x": "batch io", r"\\['w'\\]": ("io", "hidden")}`, with None or `-`
        for a dim without one. `batch` is dim 0 of the batch if no dim is called so.
      strict: refuse a name with several axes, as Mesh-TensorFlow does.
      num_microbatches: as for `autopar.ShardParallel`.
      microbatch_semantics: as for `autopar.ShardParallel`.

    Raises:
      ValueError: `rules` holds no pairs; when the step is planned: a name or an axis
        that does not exist, an axis that does not divide a dim, or two dims of a tensor
        on one axis.
    """

    rules: str
    names: Mapping[str, str | Sequence[str | None]] | None = None
    strict: bool = False
    num_microbatches: int = 1
    microbatch_semantics: MicrobatchSemantics = "exact"

    @property
    def is_auto(self) -> bool:
        """Whether the layout is to be found."""
        return self.rules.strip() == AUTO

    def __post_init__(self) -> None:
        if self.is_auto:
            return
        axes_by_name = self.axes_by_name()
        for name, axes in axes_by_name.items():
            if self.strict and len(axes) > 1:
                raise ValueError(
                    f"A dim must be split by one mesh axis under strict layout rules, "
                    f"but {name!r} is given {' and '.join(map(repr, axes))} in "
                    f"{self.rules!r}; drop one rule, or leave out strict=True."
                )

    def axes_by_name(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each name that has a rule."""
        tight = re.sub(r"\s*:\s*", ":", self.rules.strip())
        found: dict[str, tuple[str, ...]] = {}
        for part in filter(None, _SEPARATORS.split(tight)):
            name, _, axis = part.partition(":")
            if not (name and axis) or ":" in axis:
                raise ValueError(
                    f"Layout rules are made of name:axis pairs such as "
                    f"'batch:data;d_ff:model', but {self.rules!r} has the part "
                    f"{part!r}; write {name or 'name'}:AXIS."
                )
            if axis in found.get(name, ()):
                raise ValueError(
                    f"A layout rule must be given once, but {part!r} is twice in "
                    f"{self.rules!r}; drop one of the two."
                )
            found[name] = (*found.get(name, ()), axis)
        return found

    def only(self, names: Collection[str]) -> LayoutRules:
        """The rules of some names."""
        kept = (item for item in self.axes_by_name().items() if item[0] in names)
        pairs = (f"{name}:{axis}" for name, axes in kept for axis in axes)
        return replace(self, rules=";".join(pairs), names=None)

    def __str__(self) -> str:
        return f"LayoutRules({self.rules!r})"


def as_layout_rules(value: object) -> LayoutRules | None:
    """What `rules=` of `parallelize` was given.

    Raises:
      TypeError: it is neither LayoutRules nor a string of them.
    """
    if isinstance(value, str):
        value = LayoutRules(value)
    if isinstance(value, LayoutRules) and value.is_auto:
        raise ValueError(
            "`rules` fix the dims that they name, so they cannot be 'auto'; leave them "
            "out, or give method=autopar.LayoutRules('auto')."
        )
    if value is None or isinstance(value, LayoutRules):
        return value
    raise TypeError(
        f"`rules` must be autopar.LayoutRules, or a string such as 'batch:data' where "
        f"only the batch has a name, but got {value!r} of type {type(value).__name__}."
    )


def layout_restriction(
    rules: LayoutRules,
    graph: OpGraph,
    mesh: MeshShape,
    batch: Sequence[int],
    *,
    others_whole: bool,
) -> Restriction:
    """What the rules demand of every tensor.

    Args:
      rules: the layout.
      graph: the step.
      mesh: has the axes.
      batch: the tensors that are cut into microbatches, whose dim 0 is the batch.
      others_whole: whether dims without a rule are whole, or left to the solver.

    Raises:
      ValueError: see `LayoutRules`.
    """
    names = dict(given_names(rules, graph, batch))  # the last of a dim counts
    return restriction_of_names(rules, graph, mesh, names, others_whole=others_whole)


def restriction_of_names(
    rules: LayoutRules,
    graph: OpGraph,
    mesh: MeshShape,
    names: Mapping[Dim, str],
    *,
    others_whole: bool,
) -> Restriction:
    """As `layout_restriction`, for dims whose names are known."""
    layout = _Layout(rules, graph, mesh, names)
    demands: dict[int, Demand] = {}
    for tensor in graph.tensors:
        rank = tensor.type.rank
        dims = layout.dims(tensor.index)
        if others_whole:
            anything = NOT_SPLIT
        elif dims:
            others = set(range(rank)).difference(dims)
            anything = NOT_SPLIT | others
        else:
            continue
        demands[tensor.index] = tuple(
            frozenset({state}) if state != REPLICATED else anything
            for state in layout.spec(tensor.index)
        )
    return Restriction(str(rules), demands, {}, {})


def names_by_tensor(
    rules: LayoutRules, graph: OpGraph, mesh: MeshShape, names: Mapping[Dim, str]
) -> dict[int, dict[int, str]]:
    """The names with a rule that reach dims of each tensor; errors of `LayoutRules`."""
    layout = _Layout(rules, graph, mesh, names)
    return {
        tensor: {dim: named[0].name for dim, named in dims.items()}
        for tensor, dims in layout.by_tensor.items()
    }


class _Layout:
    """The rules on one graph, every name at every dim that it reaches."""

    def __init__(
        self,
        rules: LayoutRules,
        graph: OpGraph,
        mesh: MeshShape,
        names: Mapping[Dim, str],
    ) -> None:
        self.rules, self.graph, self.mesh = rules, graph, mesh
        self.axes = {name: self._axes(name) for name in rules.axes_by_name()}
        self.names = names
        self._check_names()
        num_parts = {name: self._num_parts(name) for name in self.axes}
        spread = DimTies.of(graph, mesh).spread(self.names, num_parts)
        self.by_tensor: dict[int, dict[int, tuple[NamedDim, ...]]] = {}
        for (tensor, dim), named in spread.items():
            self.by_tensor.setdefault(tensor, {})[dim] = named
        self._check_spread()

    def dims(self, tensor: int) -> dict[int, tuple[int, ...]]:
        """The mesh axes of each dim of a tensor that a rule splits, in its order."""
        named = self.by_tensor.get(tensor, {})
        return {dim: self.axes[names[0].name] for dim, names in named.items()}

    def spec(self, tensor: int) -> Spec:
        """The spec that the rules alone say."""
        spec = replicated(self.mesh.num_axes)
        for dim, axes in self.dims(tensor).items():
            spec = with_axes(spec, dim, axes)
        return spec

    def _axes(self, name: str) -> tuple[int, ...]:
        axes = self.rules.axes_by_name()[name]
        for axis in axes:
            if axis not in self.mesh.axis_names:
                raise ValueError(
                    f"Layout rules may only name axes of the mesh {self.mesh}, but "
                    f"{name!r} is given {axis!r} in {self.rules.rules!r}; use one of "
                    f"{', '.join(self.mesh.axis_names)}."
                )
        return tuple(map(self.mesh.index_of, axes))

    def _num_parts(self, name: str) -> int:
        return prod(self.mesh.axis_sizes[axis] for axis in self.axes[name])

    def _check_names(self) -> None:
        for name in self.axes:
            if name not in self.names.values():
                known = ", ".join(sorted(set(self.names.values()))) or "no other"
                raise ValueError(
                    f"A rule must be of a name that some argument's dim has, but "
                    f"{name!r} in {self.rules.rules!r} is none of {known}; give it: "
                    f"LayoutRules(..., names={{'x': '{name} ...'}})."
                )
        for dim, name in self.names.items():
            parts = self._num_parts(name) if name in self.axes else 1
            if self._size(dim) % parts:
                raise ValueError(
                    f"Mesh axes must divide the dims that they split, but {name!r} is "
                    f"split into {parts} by {self._rule(name)}, and is "
                    f"{self._place(dim)}{self._divided(name, parts)}; change the rule "
                    f"or the name."
                )

    def _divided(self, name: str, parts: int) -> str:
        """Another place of the name, where it can be split."""
        for dim, other in self.names.items():
            if other == name and self._size(dim) % parts == 0:
                return f" (and {self._place(dim)})"
        return ""

    def _check_spread(self) -> None:
        for (tensor, dim), name in self.names.items():
            for reached in self.by_tensor.get(tensor, {}).get(dim, ()):
                given = NamedDim(name, (tensor, dim))
                self._check_one_dim(given, reached)
        for tensor, dims in self.by_tensor.items():
            for named in dims.values():
                for first, second in combinations(named, 2):
                    self._check_one_dim(first, second)
            for first, second in combinations(sorted(dims), 2):
                self._check_two_dims(tensor, first, second)

    def _check_one_dim(self, first: NamedDim, second: NamedDim) -> None:
        if self.axes.get(first.name) == self.axes.get(second.name):
            return
        raise ValueError(
            f"A dim must have one rule, but {self._origin(first)} and "
            f"{self._origin(second)} are one dim of the step, with the rules "
            f"{self._rule(first.name)} and {self._rule(second.name)}; give both one "
            f"name, or put autopar.pin where the step should change the layout."
        )

    def _check_two_dims(self, tensor: int, i: int, j: int) -> None:
        first, second = self.by_tensor[tensor][i][0], self.by_tensor[tensor][j][0]
        shared = set(self.axes[first.name]) & set(self.axes[second.name])
        if not shared:
            return
        axis = self.mesh.axis_names[min(shared)]
        name, kind = self.graph.tensors[tensor].name, self.graph.tensors[tensor].type
        raise ValueError(
            f"A mesh axis may split one dim of a tensor, but {axis!r} splits dims {i} "
            f"and {j} of {name}, {kind}{self._line(tensor)}: "
            f"{self._origin(first)}, and {self._origin(second)}; give one of the two "
            f"another axis, or put autopar.pin where its name should end."
        )

    def _line(self, tensor: int) -> str:
        made = (op.source for op in self.graph.operators() if tensor in op.results)
        source = next(made, "")
        return f" ({source})" if source else ""

    def _rule(self, name: str) -> str:
        axes = self.axes.get(name, ())
        rules = [f"{name}:{self.mesh.axis_names[axis]}" for axis in axes]
        return repr(";".join(rules)) if rules else f"none for {name!r}"

    def _origin(self, named: NamedDim) -> str:
        return f"{named.name!r} of {self._place(named.origin)}"

    def _size(self, dim: Dim) -> int:
        return self.graph.tensors[dim[0]].type.shape[dim[1]]

    def _place(self, dim: Dim) -> str:
        tensor = self.graph.tensors[dim[0]]
        return f"dim {dim[1]} of {tensor.name}, {tensor.type}"


def given_names(
    rules: LayoutRules, graph: OpGraph, batch: Sequence[int]
) -> Iterator[tuple[Dim, str]]:
    """Dims of arguments and their names; of a dim that is there twice the last counts.

    Raises:
      ValueError: names that no argument, or not every dim of one, has.
    """
    by_key = rules.names or {}
    keys = keys_of_arguments(by_key, graph, "name of dims")
    words = {key: _words(names) for key, names in by_key.items()}
    if all(BATCH not in names for names in words.values()):
        yield from (((tensor, 0), BATCH) for tensor in batch)
    for tensor, key in keys.items():
        names, kind = words[key], graph.tensors[tensor].type
        if len(names) != kind.rank:
            raise ValueError(
                f"An argument needs one name for each dim (`-` for none), but "
                f"{graph.tensors[tensor].name}, {kind}, is given "
                f"{len(names)} by {key!r}: {by_key[key]!r}; write {kind.rank}."
            )
        for dim, name in enumerate(names):
            if name is not None:
                yield (tensor, dim), name


def _words(names: str | Sequence[str | None]) -> tuple[str | None, ...]:
    if isinstance(names, str):
        names = names.replace(",", " ").split()
    return tuple(None if name in (None, "-") else name for name in names)
