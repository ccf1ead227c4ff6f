"""The integer program of a relaxation: one choice of every node, by branch and cut.

HiGHS's, whose presolve and cuts know what whole choices leave of a row of memory. Its
limits are counts of its own checks (`checks.py`), so that equal programs have equal
results.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import highspy
import numpy as np

from .checks import Checks, seconds_of_check
from .relaxation import COST_SCALE, ROUNDING, Relaxation

MOST_NODES = 10_000
# HiGHS looks at the time in presolve, too, which has no checks: it may never end.
LAST_RESORT = 120.0
_OF_TREE = 2.0  # times a pivot's work, without cuts
_PRESOLVED = 3e-5  # seconds of a usual core, of a variable


@dataclass(frozen=True)
class Whole:
    """`choices` (None: none was found); nothing is below `bound`.

    Where no assignment is allowed the bound is inf.
    """

    choices: tuple[int, ...] | None
    bound: float

    def __str__(self) -> str:
        found = "nothing" if self.choices is None else "an assignment"
        return f"Whole: {found}, bound {self.bound:.6g}"


def solve_whole(
    relaxation: Relaxation,
    *,
    gap: float,
    most_nodes: int = MOST_NODES,
    most_checks: float = inf,
    most_work: float = inf,
    start: np.ndarray | None = None,
    enough: float = -inf,
    enough_bound: float = inf,
    presolves: bool = True,
) -> Whole:
    """The best assignment of a relaxation, and a bound on all of them.

    Args:
        relaxation: the program; this is the last thing to ask of it.
        gap: relative distance of bound to value at which to stop.
        most_nodes: of the tree.
        most_checks: of its limits, which HiGHS also makes within a node; then what
            there is has to do.
        most_work: in about so many seconds of work it ends, if it can.
        start: bool [choices], those of an assignment that is known.
        enough: an assignment of no more value will do.
        enough_bound: so will a bound that is no less.
        presolves: whether the program is made smaller first, without checks.
    """
    model, size = relaxation.model, relaxation.columns.size
    if not size and not relaxation.minimises_peak:  # which HiGHS does not take
        is_above = any(row.constant > relaxation.budget for row in relaxation.rows)
        return Whole(None, inf) if is_above else Whole((), relaxation.value(0.0))
    index = np.arange(size, dtype=np.int32)
    kinds = np.full(size, highspy.HighsVarType.kInteger)
    model.changeColsIntegrality(size, index, kinds)
    constant = relaxation.objective(0.0)
    model.changeObjectiveOffset(-constant)
    for name, value in {
        "solver": "choose",
        "presolve": "choose" if presolves else "off",
        "mip_rel_gap": gap,
        "mip_max_nodes": most_nodes,
        "objective_target": relaxation.objective(enough) - constant,
        "time_limit": LAST_RESORT,
    }.items():
        model.setOptionValue(name, value)
    if start is not None:
        known = _of_one_choice(relaxation, start)
        made = start[relaxation.columns[known]].astype(np.float64)
        model.setSolution(known.size, known, made)
    most_bound = relaxation.objective(enough_bound) - constant
    each = seconds_of_check(relaxation.num_variables)

    def is_enough(event: Any) -> bool:
        return event.data_out.mip_dual_bound >= most_bound

    checks = Checks(model, min(most_checks, most_work / each), is_enough)
    if presolves:
        relaxation.run(0.0)
        presolved = _PRESOLVED * relaxation.num_variables
        relaxation.clock.spend(presolved + each * checks.number)
    else:
        relaxation.run(_OF_TREE)
    if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return Whole(None, inf)
    info = model.getInfo()
    bound = info.mip_dual_bound + constant - ROUNDING * COST_SCALE
    choices = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        shares = np.zeros(relaxation.domain.size)
        shares[relaxation.columns] = np.array(model.getSolution().col_value)[:size]
        parts = np.split(shares, relaxation.starts[1:-1])
        choices = tuple(int(part.argmax()) for part in parts if part.size)
    return Whole(choices, relaxation.value(bound) if bound > -inf else -inf)


def _of_one_choice(relaxation: Relaxation, chosen: np.ndarray) -> np.ndarray:
    """The columns of nodes of which one choice is among those chosen."""
    node = np.searchsorted(relaxation.starts, relaxation.columns, side="right") - 1
    number = np.bincount(node, chosen[relaxation.columns], len(relaxation.starts))
    return np.flatnonzero(number[node] == 1).astype(np.int32)
