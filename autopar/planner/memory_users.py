"""What takes the most memory, by name, for errors and reports."""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.memory import MemoryProfile
from ..errors import InfeasiblePlanError
from ..plans.explain import format_bytes

NUM_NAMED = 5


@dataclass(frozen=True)
class MemoryUser:
    """A named value that is in memory at the peak, in bytes of one device."""

    name: str
    bytes: int
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.name}{note} {format_bytes(self.bytes)}"


def memory_users(profile: MemoryProfile) -> tuple[MemoryUser, ...]:
    """All that is in memory at the peak, largest first."""
    graph = profile.graph
    makers = {result: op for op in graph.operators() for result in op.results}
    paths = {each.tensor: each.path for each in graph.inputs}
    inputs = [each for each in profile.plan.inputs if each.memory == "device"]
    users = [MemoryUser(each.path, each.bytes) for each in inputs]
    for value in profile.temporaries():
        tensor = graph.tensors[value.tensor]
        if value.tensor in makers:
            note = f"{tensor.type}, {makers[value.tensor].source}".rstrip(", ")
        else:
            note = f"a copy, {tensor.type}"
        name = paths.get(value.tensor, tensor.name)
        users.append(MemoryUser(name, value.bytes, note))
    return tuple(sorted(users, key=lambda user: (-user.bytes, user.name)))


def infeasible_error(
    profile: MemoryProfile, budget_bytes: int, far_bound_bytes: int = 0
) -> InfeasiblePlanError:
    """That nothing was found to fit a budget.

    `profile` is of the plan that was found to need the least, and `far_bound_bytes`
    what every plan needs, where it is so far above the budget that the search ended.
    """
    least = profile.peak_bytes
    users = memory_users(profile)[:NUM_NAMED]
    largest = "; ".join(map(str, users))
    far = ""
    if far_bound_bytes:
        far = (
            f" The search ended early, as no plan should need less than "
            f"{format_bytes(far_bound_bytes)}."
        )
    error = InfeasiblePlanError(
        f"A plan must fit the memory budget of {budget_bytes:,} B "
        f"({format_bytes(budget_bytes)}) a device, but no plan was found below "
        f"{least:,} B ({format_bytes(least)}) on the mesh {profile.plan.mesh}; give "
        f"memory_budget={least}, more devices, more microbatches, a smaller batch, "
        f"remat='auto' or offload='auto'. "
        f"Most is taken by {largest}.{far}",
        least_budget_bytes=least,
        tightest_constraint=f"memory: {users[0]}" if users else "memory",
        far_bound_bytes=far_bound_bytes,
    )
    error.least_plan, error.largest_users = profile.plan, largest
    return error
