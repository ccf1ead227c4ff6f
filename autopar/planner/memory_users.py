"""What takes the most memory, by name, for errors and reports."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..costs.memory import MemoryProfile
from ..errors import InfeasiblePlanError
from ..plans.explain import format_bytes
from ..plans.plan import MemoryShares
from ..plans.plan_view import format_source
from ..sharding.mesh import MeshShape
from ..sharding.state_flow import StateFlow

NUM_NAMED = 5
OTHER_REMEDIES = (
    "more devices, more microbatches, a smaller batch, or remat='auto' or "
    "offload='auto' where these are not given yet"
)
_WORKSPACE = "workspace of products"


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
    if profile.workspace_bytes:
        users.append(MemoryUser(_WORKSPACE, profile.workspace_bytes))
    for value in profile.at_peak():
        tensor = graph.tensors[value.tensor]
        if value.tensor in makers:
            note = f"{tensor.type}, {makers[value.tensor].source}".rstrip(", ")
        else:
            note = f"a copy, {tensor.type}"
        name = paths.get(value.tensor, tensor.name)
        users.append(MemoryUser(name, value.bytes, note))
    return tuple(sorted(users, key=lambda user: (-user.bytes, user.name)))


def memory_shares(
    profile: MemoryProfile, flow: StateFlow, peak_bytes: int
) -> MemoryShares:
    """What is in memory at the peak, by kind and by line of the maker.

    Temporaries are those of the model's sweep, of which a compiler needs some factor;
    all adds up to `peak_bytes`.
    """
    graph = profile.graph
    kinds, lines = Counter[str](), Counter[str]()
    words = {"state": "optimizer state" if flow.parameters else "state"}
    words |= {"constant": "constants", "other": "other arguments"}
    for place, given in zip(graph.inputs, profile.plan.inputs, strict=True):
        if given.memory == "device":
            is_parameter = place.tensor in flow.parameters
            kind = words.get(given.role, given.role)
            kinds["parameters" if is_parameter else kind] += given.bytes
    kinds["results"] += profile.output_bytes
    lines["arguments and results"] = kinds.total()
    kinds[_WORKSPACE] = lines[_WORKSPACE] = profile.workspace_bytes
    makers = {result: op for op in graph.operators() for result in op.results}
    temporaries, made_at = Counter[str](), Counter[str]()
    for value in profile.at_peak():
        kind = "gradients" if value.tensor in flow.of_gradients else "activations"
        temporaries["copies" if value.is_copy else kind] += value.bytes
        maker = makers.get(value.tensor)
        line = format_source(maker.source) if maker else "copies of arguments"
        is_ours = line.startswith("autopar/")  # loops that remat makes
        made_at["no line of the step" if is_ours or not line else line] += value.bytes
    left = peak_bytes - kinds.total()
    kinds.update(_scaled(temporaries or Counter(temporaries=1), left))
    lines.update(_scaled(made_at or Counter({"no line of the step": 1}), left))
    return MemoryShares(tuple((+kinds).items()), tuple((+lines).items()))


def _scaled(parts: Counter[str], total: int) -> Counter[str]:
    """Whole numbers in the proportion of `parts` that add up to `total`."""
    scaled, whole, before = Counter[str](), parts.total() or 1, 0
    done = 0
    for name, part in parts.items():
        before += part
        scaled[name] = total * before // whole - done
        done += scaled[name]
    return scaled


def alike_users(profile: MemoryProfile) -> tuple[tuple[MemoryUser, int], ...]:
    """All that is in memory at the peak, and how often: in each of equal layers.

    What takes the most together comes first. Source files are named from the current
    folder, where they are in it.
    """
    found = Counter(map(_without_number, memory_users(profile)))
    pairs = sorted(found.items(), key=lambda p: (-p[0].bytes * p[1], p[0].name))
    return tuple(pairs)


def _without_number(user: MemoryUser) -> MemoryUser:
    """The user by the name that its likes of other layers have, too."""
    name = re.sub(r"\[\d+\]", "[*]", re.sub(r"\.\d+$", "", user.name))
    note = user.note.replace(f"{Path.cwd()}{os.sep}", "")
    return MemoryUser(name, user.bytes, note)


def infeasible_error(profile: MemoryProfile, budget_bytes: int) -> InfeasiblePlanError:
    """That nothing was found to fit a budget.

    `profile` is of the plan that was found to need the least.
    """
    least = profile.peak_bytes
    seen = f"no plan was found below {_told(least)} on the mesh {profile.plan.mesh}"
    remedy = f"memory_budget={least},"
    error = _refused(profile, budget_bytes, seen, remedy, "Most is taken by", least)
    error.least_plan = profile.plan
    return error


def no_room_error(
    profile: MemoryProfile,
    mesh: MeshShape,
    budget_bytes: int,
    argument_bytes: int,
    product_bytes: int,
) -> InfeasiblePlanError:
    """That no plan can fit a budget.

    Args:
      profile: of the step on one device.
      mesh: the devices.
      budget_bytes: what a device may hold.
      argument_bytes: what arguments take where each is split as far as can be.
      product_bytes: a device's part of the largest product.
    """
    seen = (
        f"on {mesh} arguments alone take {format_bytes(argument_bytes)}, each split as "
        f"far as it can be, and the largest product {format_bytes(product_bytes)}"
    )
    title = "Most is taken, on all devices together, by"
    error = _refused(profile, budget_bytes, seen, "more, or", title)
    error.bound_bytes = argument_bytes + product_bytes
    return error


def _told(num_bytes: int) -> str:
    return f"{num_bytes:,} B ({format_bytes(num_bytes)})"


def _refused(
    profile: MemoryProfile,
    budget_bytes: int,
    seen: str,
    remedy: str,
    title: str,
    least: int | None = None,
) -> InfeasiblePlanError:
    users = alike_users(profile)[:NUM_NAMED]
    largest = "\n".join(f"  {count} x {user}" for user, count in users)
    error = InfeasiblePlanError(
        f"A plan must fit the memory budget of {_told(budget_bytes)} a device, but "
        f"{seen}; give {remedy} {OTHER_REMEDIES}.\n{title}\n{largest}",
        least_budget_bytes=least,
        tightest_constraint=f"memory: {users[0][0]}" if users else "memory",
    )
    error.largest_users = largest
    return error
