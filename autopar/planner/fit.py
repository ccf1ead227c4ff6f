"""Compile in the loop: a plan within a budget is believed once its program is compiled.

The predicted peak is a model of the compiler's. Where a program needs more than its
budget, the model's error on it is taken for that on its neighbours: the budget of the
search is lowered by it, three times at most. Where nothing is predicted to fit, the
plan that needs the least is compiled: if its program fits, the budget of the search is
raised by its error; if not, ZeRO is compiled. What a plan says of its memory is the
model's figure times the errors seen before it; it is never read back from its own
program.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import replace
from math import inf
from typing import Generic, Protocol, TypeVar

import jax

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..methods.methods import Auto, ShardParallel
from ..methods.named_methods import Zero
from ..option_values import NO_BUDGET
from ..options import Options
from ..plans.plan import Prediction
from .memory_users import OTHER_REMEDIES

MOST_CORRECTIONS = 3
NEAR = 0.5
"""Plans predicted at less than this part of a device's memory need no compiling."""

MOST_ABOVE = 2.0
"""Where the least plan is predicted at more times the budget, nothing is compiled."""

_log = logging.getLogger("autopar")


class Candidate(Protocol):
    """A planned step, of one program or of stages."""

    @property
    def name(self) -> str: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def predicted(self) -> Prediction: ...
    def compiled_bytes(self, limit_seconds: float) -> int:
        """What the compiled programs hold on a device."""
        ...


_C = TypeVar("_C", bound=Candidate)


class CompiledFit(Generic[_C]):
    """Options to plan with, one after the other, until a plan fits as compiled.

    Each is answered by `add` before the next. When there are no more, `result` is the
    plan that fits, and what is predicted of it by then. Other devices than
    this process has are compiled for if `elsewhere_seconds` are given to a program.

    Raises (where it goes on):
      InfeasiblePlanError: nothing was found to fit.
    """

    def __init__(self, options: Options, elsewhere_seconds: float = 0.0) -> None:
        self.options, self.elsewhere_seconds = options, elsewhere_seconds
        self.budget = options.budget_on(options.cluster or Cluster.local())
        self.correction = 1.0
        self.seen: list[int] = []
        self._answer: _C | ValueError | None = None
        self._found: tuple[_C, Prediction] | None = None

    @property
    def result(self) -> tuple[_C, Prediction]:
        assert self._found is not None, "there are more options to answer"
        return self._found

    def add(self, answer: _C | ValueError) -> None:
        """Notes the plan that the options led to, or why there is none."""
        self._answer = answer

    def __iter__(self) -> Iterator[Options]:
        try:
            yield from self._by_search()
        except InfeasiblePlanError:
            if not (yield from self._by_method()):
                raise

    def _by_search(self) -> Iterator[Options]:
        for _ in range(1 + MOST_CORRECTIONS):
            try:
                found = yield from self._ask(self._corrected_options())
            except InfeasiblePlanError as error:
                yield from self._least(error)
                return
            if not self._is_compiled(found.num_devices):
                self._found = found, found.predicted
                return
            model_bytes = found.predicted.peak_bytes
            is_named = self.options.memory_budget is not None
            if not is_named and model_bytes * self.correction < NEAR * self.budget:
                return self._take(found)
            try:
                seen = self._compiled_bytes(found)
            except TimeoutError:
                self._found = found, found.predicted
                return
            if seen <= self._limit(found.cluster):
                return self._take(found)
            _log.info(
                "%s: compiled for %d bytes a device where %d were predicted and %d are "
                "allowed; planning again",
                *(found.name, seen, model_bytes, self.budget),
            )
            # At least a little less, so that the same plan does not come again.
            least = self.budget / model_bytes * 1.001
            self.correction = max(seen / model_bytes, least)
        raise self._refused()

    def _ask(self, options: Options) -> Generator[Options, None, _C]:
        yield options
        if isinstance(self._answer, ValueError):
            raise self._answer
        assert self._answer is not None, "options are answered by `add`"
        return self._answer

    def _least(self, error: InfeasiblePlanError) -> Generator[Options, None, None]:
        """Takes the plan that needs the least, or a quicker one, if its program fits.

        Raises:
          InfeasiblePlanError: it does not, or is too far above to be compiled.
        """
        budget, model_bytes = self.options.memory_budget, error.least_budget_bytes
        if self.correction > 1.0 and (budget is None or error.least_plan is None):
            raise self._refused(error.largest_users) from error
        if budget is None or model_bytes is None or error.least_plan is None:
            raise error
        least_bytes = max(model_bytes * self.correction, error.bound_bytes)
        size = error.least_plan.mesh.size
        if least_bytes > MOST_ABOVE * budget or not self._is_compiled(size):
            raise error
        least = error.least_plan
        given = replace(self.options, plan=least, memory_budget=None)
        least = yield from self._ask(given)
        seen = self._compiled_bytes(least)
        if seen > budget:
            raise self._refused(error.largest_users)
        had, self.correction = self.correction, seen / model_bytes
        self._take(least)
        if had > 1.0:  # others were compiled: there is nothing to be had between them
            return
        try:
            quicker = yield from self._ask(self._corrected_options())
        except InfeasiblePlanError:
            return
        if self._compiled_bytes(quicker) <= budget:
            self._take(quicker)

    def _by_method(self) -> Generator[Options, None, bool]:
        """Takes ZeRO if that fits as compiled, after plans that were to and did not.

        Compilers keep less of it than is predicted where convolutions are split.
        """
        options, budget = self.options, self.options.memory_budget
        is_free = isinstance(options.method, Auto | ShardParallel)
        if not (self.seen and budget and is_free) or options.pins or options.rules:
            return False
        for stage in 2, 3:
            method = replace(options, method=Zero(stage), memory_budget=NO_BUDGET)
            try:
                found = yield from self._ask(method)
            except ValueError:  # it does not take the step
                continue
            if self._compiled_bytes(found) <= budget:
                self._take(found)
                return True
        return False

    def _corrected_options(self) -> Options:
        """The options with the budget lowered, or raised, by the model's error."""
        if self.correction == 1.0:
            return self.options
        return replace(self.options, memory_budget=int(self.budget / self.correction))

    def _limit(self, cluster: Cluster) -> int:
        """What a program may hold: the budget, or all of a device if none was named."""
        is_named = self.options.memory_budget is not None or self.budget == NO_BUDGET
        return self.budget if is_named else cluster.device.memory_bytes

    def _is_compiled(self, num_devices: int) -> bool:
        """Whether programs are compiled: for devices of this process, or elsewhere."""
        cluster, local = self.options.cluster or Cluster.local(), Cluster.local()
        is_own = cluster.ray_hosts is None and num_devices <= jax.device_count()
        is_here = is_own and cluster.device.kind == local.device.kind
        return is_here or self.elsewhere_seconds > 0

    def _compiled_bytes(self, found: _C) -> int:
        """What the compiled programs hold, also where the compiler refuses one."""
        try:
            held = found.compiled_bytes(self.elsewhere_seconds or inf)
        except InfeasiblePlanError as error:
            if error.least_budget_bytes is None:
                raise
            held = error.least_budget_bytes
        self.seen.append(held)
        return held

    def _take(self, found: _C) -> None:
        """Its program was seen to fit, or need not be: its prediction is corrected."""
        predicted, peak_bytes = found.predicted, found.predicted.peak_bytes
        correction = min(self.correction, self.budget / max(peak_bytes, 1))
        predicted = replace(
            predicted,
            peak_bytes=round(peak_bytes * correction),
            budget_bytes=0 if self.budget == NO_BUDGET else self.budget,
            memory_correction=correction,
        )
        self._found = found, predicted

    def _refused(self, users: str = "") -> InfeasiblePlanError:
        least = min(self.seen)
        is_named = self.options.memory_budget is not None
        what = "memory budget of" if is_named else "capacity, of which a plan may hold"
        more = f"memory_budget={least}, " if is_named else "a larger device, "
        return InfeasiblePlanError(
            f"A compiled program must fit the {what} {self.budget:,} B a device, but "
            f"the least of those compiled needs {least:,} B; give {more}"
            f"{OTHER_REMEDIES}." + (f"\nMost is taken by\n{users}" if users else ""),
            least_budget_bytes=least,
            tightest_constraint="memory of the compiled program",
        )
