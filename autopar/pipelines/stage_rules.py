"""Layout rules in all stages: a dim has one name wherever a stage has a part of it.

Names spread through a whole microbatch and through the update until the leaves have the
same in both. What the program of a stage takes has names from there, which spread in it
as in a step of one program (`layout_rules.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ..graph.dim_names import Dim
from ..graph.op_graph import OpGraph
from ..methods.layout_rules import (
    LayoutRules,
    given_names,
    names_by_tensor,
    restriction_of_names,
)
from ..methods.restrictions import Restriction
from ..sharding.mesh import MeshShape
from .stage_trace import StepParts

_NamesBySlot = dict[str, dict[int, str]]  # by dim


@dataclass(frozen=True, eq=False)
class StageRules:
    """The rules of a step that is cut; names of dims are by path of leaf pieces."""

    rules: LayoutRules
    parts: StepParts
    _known: dict[MeshShape, _NamesBySlot] = field(default_factory=dict)

    def restriction(
        self, part: OpGraph, mesh: MeshShape, settled: Collection[int]
    ) -> Restriction:
        """What the program of a stage leaves to the solver; it takes slots.

        `settled` are arguments that lie as programs of the stage before it have them.

        Raises:
          ValueError: see `LayoutRules`.
        """
        names = _at_inputs(part, self._slots(mesh))
        rules = self.rules.only({*names.values()})
        found = restriction_of_names(rules, part, mesh, names, others_whole=False)
        homes = {tensor: (None,) * mesh.num_axes for tensor in settled}
        return replace(found, name=str(self.rules), homes=homes)

    def _slots(self, mesh: MeshShape) -> _NamesBySlot:
        """The names of what programs take from outside or from each other."""
        if mesh not in self._known:
            self._known[mesh] = self._spread(mesh)
        return self._known[mesh]

    def _spread(self, mesh: MeshShape) -> _NamesBySlot:
        microbatch, update = self.parts.microbatch, self.parts.apply
        batch = [i.tensor for i in microbatch.inputs if i.path in self.parts.batch]
        names = dict(given_names(self.rules, microbatch, batch))
        rules, leaves = self.rules, {*self.parts.held, *self.parts.sums}
        while True:
            found = names_by_tensor(rules, microbatch, mesh, names)
            slots = _by_slot(microbatch, found, "again ")
            ends = {slot: slots[slot] for slot in leaves & slots.keys()}
            of_leaves = _at_inputs(update, ends)
            rules = self.rules.only({*of_leaves.values()})
            found = names_by_tensor(rules, update, mesh, of_leaves)
            later = _by_slot(update, found, "apply ")
            more = {slot: later[slot] for slot in leaves & later.keys()}
            both = {**names, **_at_inputs(microbatch, more)}
            if both == names or ends == more:
                return {**later, **slots, **more}
            names, rules = both, self.rules


def _at_inputs(
    graph: OpGraph, slots: Mapping[str, Mapping[int, str]]
) -> dict[Dim, str]:
    """The names of the dims of a graph's inputs, from those of their slots."""
    return {
        (i.tensor, dim): name
        for i in graph.inputs
        for dim, name in slots.get(i.path, {}).items()
    }


def _by_slot(
    graph: OpGraph, found: Mapping[int, dict[int, str]], prefix: str
) -> _NamesBySlot:
    """Names by slot; what another program made has a prefix in some programs."""
    named = {t.name: found[t.index] for t in graph.tensors if t.index in found}
    named |= {f"{prefix}{name}": dims for name, dims in named.items()}
    for path, operand in zip(graph.output_paths, graph.outputs, strict=True):
        if isinstance(operand, int) and operand in found:
            named[path] = found[operand]
    return named
