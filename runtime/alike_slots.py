"""Slots that live and die together, as one: what a simulation need not tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from autopar.lowering.programs import PipelineProgram


@dataclass(frozen=True, eq=False)
class AlikeSlots:
    """A pipeline without code whose slots stand for several; `members` says which.

    Slots are alike if they are of one kind and stage, the same programs read and make
    them, and nobody sends them. A stage has as many parameters and gradients as its
    layers; joined, a step takes as long and holds as much.
    """

    program: PipelineProgram
    members: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(program: PipelineProgram) -> AlikeSlots:
        """The slots of a program, joined; each group goes by the name of its first."""
        users: dict[str, dict[tuple[int, bool], None]] = {n: {} for n in program.slots}
        for index, body in enumerate(program.programs):
            for is_made, names in ((False, body.inputs), (True, body.outputs)):
                for name in names:
                    users[name][index, is_made] = None
        groups: dict[object, list[str]] = {}
        for name, slot in program.slots.items():
            stages = {program.programs[i].stage for i, _ in users[name]}
            is_sent = slot.kind != "batch" and stages - {slot.stage}
            alike = (slot.kind, slot.stage, tuple(users[name]))
            groups.setdefault(name if is_sent else alike, []).append(name)
        members = {names[0]: tuple(names) for names in groups.values()}
        first = {each: name for name, names in members.items() for each in names}

        def joined(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(first[name] for name in names))

        return AlikeSlots(
            replace(
                program,
                slots={name: program.slots[name] for name in members},
                programs=tuple(
                    replace(
                        body,
                        inputs=joined(body.inputs),
                        outputs=joined(body.outputs),
                        donated=(),
                    )
                    for body in program.programs
                ),
            ),
            members,
        )

    def bytes_of(
        self, slot_bytes: Callable[[str, int], int]
    ) -> Callable[[str, int], int]:
        """Bytes of all that a slot stands for, on a stage; as those of a single one."""

        @cache
        def bytes_(slot: str, stage: int) -> int:
            return sum(slot_bytes(name, stage) for name in self.members[slot])

        return bytes_
