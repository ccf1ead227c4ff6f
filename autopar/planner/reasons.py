"""Why a plan chose as it did, told by what can plan its step again."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..plans.plan_view import Decision, PlanView
from ..sharding.pins import PinsLike
from .pin_costs import PinCosts


@dataclass(frozen=True)
class Alternative:
    """A plan with one thing changed: its price is the difference to the plan at hand.

    `plan` is None where there is none, and `refusal` then says why. Of a choice in a
    stage it is that of the whole pipeline.
    """

    title: str
    choice: str
    plan: Decision | None
    refusal: str = ""

    @classmethod
    def of(cls, title: str, plan: Decision) -> Alternative:
        """A plan as an alternative to another, chosen by its mesh."""
        return cls(title, " | ".join(map(str, PlanView(plan).meshes)), plan)

    @classmethod
    def refused(cls, title: str, error: Exception) -> Alternative:
        """What has no plan."""
        return cls(title, "", None, str(error))


@dataclass(frozen=True)
class Reasons:
    """What holds one choice of a plan, who reads its result, what else could be.

    `readers` are operators and outputs with the spec they read the tensor in.
    """

    holders: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    readers: tuple[tuple[str, str], ...] = ()


class PlanShardings(NamedTuple):
    """`in_shardings` and `out_shardings` of `jax.jit`: the step's own trees."""

    arguments: tuple[Any, ...]
    results: Any


class PlanSource(Protocol):
    """The step that a plan is of, whole or in stages, which can be planned again."""

    def what_if(self, plan: Any, pins: PinsLike, gap: float) -> tuple[Any, PlanSource]:
        """The step planned with more pins, on the same mesh, and itself with them.

        The plan of one program is within `gap` of the best.
        """
        ...

    def pin_costs(self, plan: Any) -> PinCosts:
        """What each pin adds to a step, which is planned again without it."""
        ...

    def tensor_reasons(self, plan: Any, tensor: int, program: int) -> Reasons:
        """Why a tensor of a program, by their indices, is made in its spec."""
        ...

    def operator_reasons(self, plan: Any, operator: int, program: int) -> Reasons:
        """Why an operator of a program, by its position, has its factors."""
        ...


def nearest_names(name: str, known: Sequence[str], number: int = 5) -> list[str]:
    """The known names that are most like one, those that hold it first."""
    holding = [each for each in known if name in each]
    close = difflib.get_close_matches(name, known, number, 0.4)
    return list(dict.fromkeys([*holding[:number], *close]))[:number]
