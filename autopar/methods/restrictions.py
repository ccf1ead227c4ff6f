"""What a method demands of tensors: for mesh axes, some of the states they may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..sharding.spec import MAX, MIN, REPLICATED, SUM, State

PENDING = frozenset((SUM, MAX, MIN))
NOT_SPLIT = PENDING | {REPLICATED}
WHOLE = frozenset((REPLICATED,))


States = frozenset[State] | None  # None: any
Demand = tuple[States, ...]  # by mesh axis
Demands = Mapping[int, Demand]  # by tensor


@dataclass(frozen=True)
class Restriction:
    """Demands on tensors: where they are read or made, only where made, where at home.

    `everywhere` holds for every copy of a tensor, `made` for what operators and borders
    of loops write, `homes` for where arguments lie and state returns to. The narrower
    demand stands in place of the wider. Of homes that meet it alike those `preferred`
    stay, if there are any. `returned` holds for what the function returns that is no
    state. `name` is what errors call it.
    """

    name: str
    everywhere: Demands
    made: Demands
    homes: Demands
    preferred: Demands = field(default_factory=dict)
    returned: Demands = field(default_factory=dict)

    def of(self, kind: str, tensor: int, *, is_write: bool) -> Demand | None:
        """What a vertex of a kind must do with a tensor; None if anything goes."""
        if kind == "relay":
            return None  # its readers are restricted
        narrow: Demands = {}
        if is_write:
            narrow = self.homes if kind == "home" else self.made
        elif kind == "result":
            narrow = self.returned
        return narrow.get(tensor, self.everywhere.get(tensor))
