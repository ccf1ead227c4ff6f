"""What autopar raises and warns with.

Every message gives the rule, the value seen and the remedy. A mistake in an argument is
a plain `ValueError` or `TypeError`; the classes here are for what a caller may catch.
"""

from __future__ import annotations

from typing import Any


class AutoparError(Exception):
    """Base of every error that is autopar's own."""


class InfeasiblePlanError(AutoparError, ValueError):
    """No plan satisfies the memory budget, the pins and the rules together.

    Attributes:
      least_budget_bytes: the least budget per device that would do, in bytes; None
        where memory is not what stands in the way.
      tightest_constraint: the constraint that rules out the last plan, in words.
      bound_bytes: what every plan needs, where that is above the budget; else 0.
      least_plan: the `ShardingPlan` of that least budget, where there is one.
      largest_users: what takes the most of its memory, in words.
    """

    least_plan: Any = None
    largest_users = ""
    bound_bytes = 0

    def __init__(
        self,
        message: str,
        least_budget_bytes: int | None = None,
        tightest_constraint: str = "",
    ) -> None:
        super().__init__(message, least_budget_bytes, tightest_constraint)
        self.least_budget_bytes = least_budget_bytes
        self.tightest_constraint = tightest_constraint

    def saying_more(self, more: str) -> InfeasiblePlanError:
        """The same, with more words at its end."""
        same = InfeasiblePlanError(f"{self}\n{more}", *self.args[1:])
        same.least_plan, same.largest_users = self.least_plan, self.largest_users
        same.bound_bytes = self.bound_bytes
        return same

    def without_frames(self) -> InfeasiblePlanError:
        """Itself, to be kept: frames of a traceback hold all that was searched."""
        self.__context__ = self.__cause__ = None
        return self.with_traceback(None)

    def __str__(self) -> str:
        return str(self.args[0])


class AuditError(AutoparError, AssertionError):
    """A program does not hold the collectives that its plan predicts."""


class TargetError(AutoparError, ValueError):
    """Devices that are not here cannot be compiled for: a kind, size or compiler."""


class PlanFileError(AutoparError, ValueError):
    """A plan file cannot be read, or belongs to another function or version."""


class ClusterFileError(AutoparError, ValueError):
    """A cluster file lacks a field, or holds one that makes no sense."""


class CheckpointError(AutoparError, ValueError):
    """A checkpoint is missing, unfinished, damaged, or of another model."""


class FallbackWarning(UserWarning):
    """Something unknown was met; the result is correct, and may be slow."""


class WorkerError(AutoparError, RuntimeError):
    """An exception on another host; its traceback there is part of the text.

    Attributes:
      rank: the number of the host.
      traceback: the traceback on that host.
      is_echo: whether another host's failure is the cause.
    """

    def __init__(
        self, message: str, rank: int, traceback: str = "", is_echo: bool = False
    ) -> None:
        super().__init__(message, rank, traceback, is_echo)
        self.rank, self.traceback, self.is_echo = rank, traceback, is_echo

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.args[0], self.traceback]))


class HostLostError(AutoparError, RuntimeError):
    """A host died, fell silent, or did not finish in time.

    Attributes:
      rank: the number of the host.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])
