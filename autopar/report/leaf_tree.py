"""The arguments of a step as a tree by path, with what each takes on one device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from ..graph.op_graph import Role
from ..plans.plan import InputPlan, ShardingPlan
from ..plans.staged_plan import StagedPlan
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec, num_shards

_TOKEN = re.compile(r"\[[^\]]*\]|\.?[^.\[]+")
_KINDS = {"state": "state", "batch": "batch", "constant": "constants"}
_ORDER = ("parameters", "optimizer state", "state", "batch", "constants", "other")


@dataclass(frozen=True)
class Leaf:
    """One argument leaf: `stage` is where it lives, None where there are no stages."""

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    mesh: MeshShape
    device_bytes: int
    stage: int | None = None

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return self.device_bytes * num_shards(self.spec, self.mesh.axis_sizes)


@dataclass(frozen=True)
class Branch:
    """The leaves below one path: `name` is the end of `path` that the parent lacks."""

    name: str
    path: str
    branches: tuple[Branch, ...]
    leaves: tuple[Leaf, ...]

    def all_leaves(self) -> tuple[Leaf, ...]:
        """Every leaf below."""
        below = (leaf for branch in self.branches for leaf in branch.all_leaves())
        return (*self.leaves, *below)

    @property
    def device_bytes(self) -> int:
        """Bytes on one device (of each stage that has some)."""
        return sum(leaf.device_bytes for leaf in self.all_leaves())

    @property
    def whole_bytes(self) -> int:
        """Bytes in all."""
        return sum(leaf.whole_bytes for leaf in self.all_leaves())


def leaf_tree(leaves: Iterable[Leaf]) -> tuple[Branch, ...]:
    """A tree for each kind of leaf, named by the kind."""
    by_kind: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        by_kind.setdefault(leaf.kind, []).append(leaf)
    kinds = sorted(by_kind, key=lambda kind: (*_ORDER, kind).index(kind))
    trees = []
    for kind in kinds:
        root = _branch("", "", [(_TOKEN.findall(x.path), x) for x in by_kind[kind]])
        trees.append(Branch(kind, "", root.branches, root.leaves))
    return tuple(trees)


def _branch(
    name: str, path: str, leaves: Sequence[tuple[Sequence[str], Leaf]]
) -> Branch:
    """The branch of leaves whose remaining tokens are given; chains are one branch."""
    own: list[Leaf] = []
    below: dict[str, list[tuple[Sequence[str], Leaf]]] = {}
    for tokens, leaf in leaves:
        if len(tokens) <= 1:
            own.append(leaf)
        else:
            below.setdefault(tokens[0], []).append((tokens[1:], leaf))
    branches = tuple(_branch(t, path + t, rest) for t, rest in below.items())
    if not own and len(branches) == 1 and name:
        only = branches[0]
        return Branch(name + only.name, only.path, only.branches, only.leaves)
    return Branch(name, path, branches, tuple(own))


def leaves_of_plan(plan: ShardingPlan, kinds: Mapping[str, str]) -> tuple[Leaf, ...]:
    """The leaves of a plan of one program; `kinds` are better known ones by path."""
    read = _Reader(plan, kinds)
    return tuple(map(read.leaf, plan.inputs))


def leaves_of_stages(plan: StagedPlan, kinds: Mapping[str, str]) -> tuple[Leaf, ...]:
    """The leaves of a pipeline: those that a stage keeps or is given, each once.

    Values that one stage program makes for another are none of them.
    """
    programs = [
        (each, _Reader(each.sharding, kinds, each.stage)) for each in plan.programs
    ]
    between = _between_programs(plan)
    found: dict[tuple[str, int], Leaf] = {}
    for kind, roles in (("apply", ("state",)), ("forward", get_args(Role))):
        for each, read in programs:
            for argument in each.sharding.inputs:
                is_own = argument.role in roles and argument.path not in between
                if each.kind == kind and is_own:
                    key = argument.path, each.stage
                    found.setdefault(key, read.leaf(argument))
    return tuple(found.values())


def _between_programs(plan: StagedPlan) -> set[str]:
    """What stage programs make for each other: activations, and sums of gradients."""
    sums = {
        argument.path
        for each in plan.programs
        if each.kind != "apply"
        for argument in each.sharding.inputs
        if argument.role in ("state", "sum")
    }
    kept = {
        argument.path
        for each in plan.programs
        if each.kind == "apply"
        for argument in each.sharding.inputs
        if argument.role == "state"
    }
    return sums | ({each.slot for each in plan.transfers} - kept)


class _Reader:
    """Reads the leaves of one program."""

    def __init__(
        self, plan: ShardingPlan, kinds: Mapping[str, str], stage: int | None = None
    ) -> None:
        self.plan, self.kinds, self.stage = plan, kinds, stage
        self.dtypes = {tensor.name: tensor.dtype for tensor in plan.tensors}

    def leaf(self, each: InputPlan) -> Leaf:
        return Leaf(
            each.path,
            self.kinds.get(each.path, _KINDS.get(each.role, "other")),
            each.shape,
            self.dtypes.get(each.path, ""),
            each.spec,
            self.plan.mesh,
            each.bytes,
            self.stage,
        )
