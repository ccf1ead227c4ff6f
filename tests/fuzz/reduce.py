"""Reduces a failing program to the lines, results and plan that it fails with.

Lines are dropped one by one while the program fails alike. hypothesis would shrink the
choices that drew the program instead, of which most change all that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter

import jax

from tests.fuzz.oracle import check_case, reference_of
from tests.fuzz.plans import Case, lower_case, trace_program
from tests.fuzz.programs import Program, without_line

# What a wrong planner or rule may raise; the failure may be that there is no plan.
_OF_PLANNING = (NotImplementedError, AssertionError, ValueError, TypeError, LookupError)
_SHOWN = 40  # operators of a plan that are printed
_SAME = 30  # failures whose texts begin alike are taken for one


def failure_of(program: Program, case: Case) -> str:
    """One line for the error, or nothing if the program is right or refused."""
    try:
        check_case(reference_of(program), case)
    except NotImplementedError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reduced(program: Program, case: Case, seconds: float) -> tuple[Program, Case]:
    """A smaller program that fails too, under this plan or any of a few others."""
    start, wanted = perf_counter(), failure_of(program, case)[:_SAME]

    def next_one() -> tuple[Program, Case] | None:
        others = [Case(case.mesh, "uniform", seed) for seed in range(4)]
        for smaller in _smaller(program):
            for each in (case, *others):
                if perf_counter() - start > seconds:
                    return None
                if failure_of(smaller, each)[:_SAME] == wanted:
                    return smaller, each
        return None

    while found := next_one():
        program, case = found
    return program, case


def _smaller(program: Program) -> Iterator[Program]:
    """Without the gradient, a line, a result, or all that follows a line."""
    if program.gradient:
        yield replace(program, gradient=())
    elif program.lines:
        last = program.lines[-1]
        made = {name for line in program.lines[:-1] for name in line.results}
        results = tuple(name for name in last.operands if name in made)
        if results:
            yield replace(program, lines=program.lines[:-1], results=results)
    for index in reversed(range(len(program.lines))):
        without = without_line(program, index)
        if without is not None:
            yield without
    for index in range(len(program.results)):
        rest = program.results[:index] + program.results[index + 1 :]
        if rest:
            yield replace(program, results=rest)


def report_of(program: Program, case: Case) -> str:
    """The failure with all that is needed to repeat it by hand."""
    return f"{failure_of(program, case)}\non {case}\n{program}\n{_plan(program, case)}"


def _plan(program: Program, case: Case) -> str:
    """One line for each operator: its factors and specs."""
    values = program.values()
    try:
        with jax.enable_x64(program.x64):
            lowered = lower_case(trace_program(program.function(), values), case)
    except _OF_PLANNING as error:
        return f"no plan was made: {type(error).__name__}: {error}"
    plan = lowered.plan.sharding
    lines = [f"  {each.path}: {each.spec}" for each in plan.inputs]
    for op in plan.operators[:_SHOWN]:
        specs = f"{list(op.operand_specs)} -> {list(op.result_specs)}"
        lines.append(f"  {op.name}: {' '.join(op.factors) or 'ports'}  {specs}")
    for position, specs in enumerate(plan.outputs):
        lines.append(f"  block {position} returns {list(specs)}")
    return "\n".join(["plan:", *lines])
