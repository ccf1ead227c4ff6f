"""One view of a plan: its programs, and in them leaves, operators and collectives.

A plan of one program is one of a single stage without a schedule. What explains a plan,
compares two or reports one reads it here; operators and collectives count as often in a
step as their program runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ..graph.op_graph import MemoryKind, Role
from ..graph.work import is_heavy
from ..sharding.collective import Collective
from ..sharding.group_names import GroupNames
from ..sharding.mesh import MeshShape
from ..sharding.spec import (
    MAX,
    MIN,
    REPLICATED,
    SUM,
    Spec,
    State,
    dim_of,
    format_spec,
    local_shape,
    num_shards,
)
from .plan import InputPlan, OperatorPlan, Prediction, ShardingPlan
from .staged_plan import StagedPlan

Decision = ShardingPlan | StagedPlan

_WORDS = {REPLICATED: "whole", SUM: "sum", MAX: "max", MIN: "min"}
# What a stage program takes is an argument, a sum over microbatches, or the result of
# an operator, whose name ends in a number as no path does.
_BETWEEN_PROGRAMS = re.compile(r"^sum of |\.\d+(:\d+)?$")
_KEPT_LAST = ("weight", "backward", "forward", "apply")
_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class LeafView:
    """What a program is given; `bytes` are those of one device.

    `stage` is where it lives, None where there are no stages.
    """

    path: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    mesh: MeshShape
    bytes: int
    memory: MemoryKind = "device"
    stage: int | None = None

    @property
    def spec_text(self) -> str:
        """How it is split, and that the host has it."""
        text = format_spec(self.spec, len(self.shape), self.mesh.axis_names)
        return f"{text} on the host" if self.memory == "host" else text

    @property
    def local_shape(self) -> tuple[int, ...]:
        """What one device has of it."""
        return tuple(local_shape(self.shape, self.spec, self.mesh.axis_sizes))

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole leaf."""
        return self.bytes * num_shards(self.spec, self.mesh.axis_sizes)


@dataclass(frozen=True)
class OperatorView:
    """An operator of a program; `seconds` are those of a step."""

    program: ProgramView
    index: int
    plan: OperatorPlan

    @property
    def is_heavy(self) -> bool:
        """Whether it is a product or a convolution."""
        return is_heavy(self.plan.kind)

    @property
    def seconds(self) -> float:
        """Predicted compute of a step."""
        return self.plan.seconds * self.program.times

    @property
    def line(self) -> str:
        """Its source line, as `format_source` writes it."""
        return format_source(self.plan.source)

    @property
    def title(self) -> str:
        """Its primitive, and the phase: `dot_general (backward)`."""
        phase = " (backward)" if "transpose(" in self.plan.name else ""
        return f"{self.plan.kind}{phase}"

    @property
    def splits(self) -> tuple[str, ...]:
        """For each mesh axis what it does to the first result, in words."""
        result: Spec = self.plan.result_specs[0] if self.plan.result_specs else ()
        return tuple(map(state_words, result))


@dataclass(frozen=True)
class CollectiveView:
    """A collective: its tensor and source line, and the axes that it runs over."""

    program: ProgramView
    plan: Collective
    tensor: str
    source: str
    axes: str

    @property
    def count(self) -> int:
        """Executions in a step."""
        return self.plan.count * self.program.times

    @property
    def bytes(self) -> int:
        """Result bytes of one device in a step."""
        return self.plan.total_bytes * self.program.times

    @property
    def line(self) -> str:
        """Its source line, or the tensor where that has none."""
        return format_source(self.source) or self.tensor

    @property
    def marks(self) -> str:
        """What of its count is not certain."""
        words = ("conditional", "unbounded")
        return " ".join(word for word in words if getattr(self.plan, word))


@dataclass(frozen=True, eq=False)
class ProgramView:
    """One program, and how often it runs in a step; `stage` is None if it is alone."""

    sharding: ShardingPlan
    index: int = 0
    times: int = 1
    stage: int | None = None
    kind: str = ""

    @property
    def name(self) -> str:
        """Such as `stage 0 forward`; nothing if it is alone."""
        return "" if self.stage is None else f"stage {self.stage} {self.kind}"

    @cached_property
    def leaves(self) -> tuple[LeafView, ...]:
        """All that it is given."""
        dtypes = {tensor.name: tensor.dtype for tensor in self.sharding.tensors}
        return tuple(
            self._leaf(each, dtypes.get(each.path, "")) for each in self.sharding.inputs
        )

    def _leaf(self, each: InputPlan, dtype: str) -> LeafView:
        return LeafView(
            *(each.path, each.role, each.shape, dtype, each.spec, self.sharding.mesh),
            *(each.bytes, each.memory, self.stage),
        )

    @cached_property
    def operators(self) -> tuple[OperatorView, ...]:
        """In the plan's order."""
        operators = enumerate(self.sharding.operators)
        return tuple(OperatorView(self, index, op) for index, op in operators)

    @cached_property
    def collectives(self) -> tuple[CollectiveView, ...]:
        """In the plan's order."""
        plan = self.sharding
        groups = GroupNames(plan.mesh.size, plan.mesh)
        lines = {op.source for op in plan.operators if op.source}
        return tuple(
            CollectiveView(
                self,
                each,
                *tensor_and_line(each, lines),
                groups.name(each.kind, each.groups),
            )
            for each in plan.collectives
        )


@dataclass(frozen=True, eq=False)
class PlanView:
    """A plan of one program, or of a pipeline."""

    decision: Decision

    @cached_property
    def programs(self) -> tuple[ProgramView, ...]:
        """In their order."""
        plan = self.decision
        if isinstance(plan, ShardingPlan):
            return (ProgramView(plan),)
        return tuple(
            ProgramView(each.sharding, index, plan.times(each), each.stage, each.kind)
            for index, each in enumerate(plan.programs)
        )

    @property
    def stages(self) -> StagedPlan | None:
        """The decision for a pipeline; None if there is one program."""
        return self.decision if isinstance(self.decision, StagedPlan) else None

    @cached_property
    def leaves(self) -> tuple[LeafView, ...]:
        """The step's arguments: those of a pipeline once for each stage with them."""
        if self.stages is None:
            return self.programs[0].leaves
        by_kind = sorted(self.programs, key=lambda p: _KEPT_LAST.index(p.kind))
        homes = {(leaf.path, leaf.stage): leaf for p in by_kind for leaf in p.leaves}
        given = dict.fromkeys(
            (leaf.path, leaf.stage)
            for program in self.programs
            for leaf in program.leaves
            if not _BETWEEN_PROGRAMS.search(leaf.path)
        )
        return tuple(homes[place] for place in given)

    @property
    def operators(self) -> tuple[OperatorView, ...]:
        """Of all programs."""
        return tuple(op for program in self.programs for op in program.operators)

    @property
    def collectives(self) -> tuple[CollectiveView, ...]:
        """Of all programs."""
        return tuple(each for program in self.programs for each in program.collectives)

    @property
    def predicted(self) -> Prediction:
        """Seconds and bytes of a step."""
        return self.decision.predicted

    @property
    def meshes(self) -> tuple[MeshShape, ...]:
        """The mesh, or those of the submeshes."""
        plan = self.decision
        return (plan.mesh,) if isinstance(plan, ShardingPlan) else plan.meshes

    @property
    def state_bytes(self) -> int:
        """Bytes of state on one device; of a pipeline, on the one that has most."""
        held = [0] * len(self.meshes)
        for leaf in self.leaves:
            if leaf.role == "state" and leaf.memory == "device":
                held[(leaf.stage or 0) % len(held)] += leaf.bytes
        return max(held)

    @property
    def form(self) -> str:
        """One program with what it makes again, or how a pipeline is cut."""
        plan = self.decision
        if isinstance(plan, ShardingPlan):
            return f"one program{f', remat {plan.remat}' if plan.remat else ''}"
        return (
            f"{plan.num_stages} stages, {plan.num_microbatches} microbatches, "
            f"{plan.schedule}"
        )


def grouped(items: Iterable[_T], key: Callable[[_T], _Key]) -> list[list[_T]]:
    """Items of equal keys together, in the order of the first."""
    groups: dict[_Key, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def tensor_and_line(each: Collective, lines: set[str]) -> tuple[str, str]:
    """What a collective converts, and the source line that asks for it, if any does."""
    for index, letter in enumerate(each.source):
        if letter == " " and each.source[index + 1 :] in lines:
            return each.source[:index], each.source[index + 1 :]
    return ("", each.source) if each.source in lines else (each.source, "")


def split_words(spec: Spec, names: Sequence[str]) -> str:
    """What each mesh axis does to a tensor: `x dim 1, y sum`; `whole` if nothing."""
    words = [
        f"{name} {state_words(state)}"
        for name, state in zip(names, spec, strict=True)
        if state != REPLICATED
    ]
    return ", ".join(words) or "whole"


def state_words(state: State) -> str:
    """What a mesh axis does to a tensor: `dim 1`, `whole`, `sum`."""
    return f"dim {dim_of(state)}" if state >= 0 else _WORDS[state]


def format_source(source: str) -> str:
    """A source line as `models/gpt.py:12 (attention)`, if below the current folder.

    That of a package begins with the package's name.
    """
    place, _, function = source.partition(" (")
    path, *numbers = place.rsplit(":", 2)
    if not numbers:
        return source
    try:
        path = str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        pass
    path = path.rpartition("site-packages/")[2]
    name = function.rstrip(")").rpartition(".")[2]
    return f"{path}:{numbers[0]}" + (f" ({name})" if name else "")
