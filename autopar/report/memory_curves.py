"""Memory over a step, as the memory model and the schedule see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..costs.memory import MemoryProfile
from ..graph.op_graph import Operator
from ..planner.memory_users import MemoryUser, memory_users
from ..plans.plan_view import format_source
from .findings import MemoryCurve


def curve_of_program(profile: MemoryProfile, correction: float = 1.0) -> MemoryCurve:
    """The curve of one program, kernel by kernel in the compiler's order.

    `correction` is the error of the model, as compiling showed it.
    """
    graph, memory = profile.graph, profile.blocks[0]
    base = profile.argument_bytes + profile.output_bytes
    operators = {op.index: op for op in graph.blocks[0].operators}
    labels = [_label(operators.get(index)) for index in memory.operators]
    held = [profile.bytes_at(place) for place in range(len(labels))]
    return MemoryCurve(
        "one device",
        round(base * correction),
        tuple(round(each * correction) for each in held or [base]),
        tuple(labels) or ("nothing runs",),
        memory_users(profile),
    )


def curve_of_submesh(
    title: str,
    working_bytes: int,
    tasks: Sequence[tuple[str, Counter[str], int]],
    slot_bytes: Mapping[str, int],
    notes: Mapping[str, str],
) -> MemoryCurve:
    """The curve of a submesh, task by task.

    Args:
      title: which submesh.
      working_bytes: what its largest program takes besides its arguments and results;
        the plan keeps it free for every task.
      tasks: name of each task, how many values of each slot are held, and their bytes.
      slot_bytes: of one value on one device.
      notes: types of slots, by name.
    """
    fullest = max(tasks, key=lambda task: task[2])
    users = [
        MemoryUser(
            slot,
            slot_bytes[slot] * count,
            f"{notes.get(slot, '')}{f', {count} microbatches' if count > 1 else ''}",
        )
        for slot, count in fullest[1].items()
    ]
    users.append(MemoryUser("temporaries of its largest program", working_bytes))
    users.sort(key=lambda user: (-user.bytes, user.name))
    return MemoryCurve(
        title,
        working_bytes,
        tuple(held + working_bytes for _, _, held in tasks),
        tuple(name for name, _, _ in tasks),
        tuple(users),
    )


def _label(operator: Operator | None) -> str:
    if operator is None:
        return "a copy in another spec"
    phase = ""
    if "transpose(" in operator.name:
        phase = "backward: "
    elif "jvp(" in operator.name:
        phase = "forward: "
    source = format_source(operator.source)
    return f"{phase}{operator.kind}" + (f" at {source}" if source else "")
