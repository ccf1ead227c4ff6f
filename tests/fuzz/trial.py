"""One trial: a program and a case, drawn by seed, or led to what is not yet reached."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from pathlib import Path

from tests.fuzz.cases import draw_case
from tests.fuzz.generate import RULES, draw_program
from tests.fuzz.oracle import Outcome, check_case, reference_of
from tests.fuzz.plans import Case, case_reaching
from tests.fuzz.programs import Program
from tests.fuzz.record import Record
from tests.fuzz.reduce import reduced, report_of

ON_ONE_DEVICE = "plain jit on one device, before it runs "
REDUCE_SECONDS = 60.0


class Failure(Exception):
    """A trial that failed; prints as the smaller program that fails alike."""

    def __init__(self, program: Program, case: Case) -> None:
        self.program, self.case = program, case

    def keep(self, path: Path) -> None:
        """Append it to a file, as it was drawn."""
        keep(path, repr(self.__cause__), text_of(self.program, self.case))

    def __str__(self) -> str:
        return report_of(*reduced(self.program, self.case, REDUCE_SECONDS))


def keep(path: Path, error: str, text: str) -> None:
    """Append a program that failed, in one piece whoever else appends."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(f"{error}\n{text}\n\n".encode())


def text_of(program: Program, case: Case) -> str:
    """All that is needed to run it again by hand."""
    return f"on {case}\n{program}"


def draw_program_of(
    draw: random.Random, topic: str, wanted: Collection[str] = ()
) -> Program:
    """Of a topic; half of the programs follow recipes of rules `wanted`, if any."""
    if wanted and draw.randrange(2):
        topic = RULES
    return draw_program(draw, topic, frozenset(wanted))


def run_trial(
    seed: int,
    topic: str,
    record: Record,
    covered: Record | None,
    started: Callable[[str], object] = len,
) -> None:
    """Draw a program and a case by seed, run it, and add what it shows to `record`.

    What `covered` misses is what it looks for: the same seed gives the same trial as
    long as that is the same. The plan is then the one of several that uses the most.
    `started` is given the text of what is about to be run, which may end the process;
    it begins with `ON_ONE_DEVICE` where that is plain JAX.

    Raises:
      Failure: the program is wrong, or fails.
    """
    draw = random.Random(f"{topic} {seed}")
    program = draw_program_of(draw, topic, covered.missing() if covered else ())
    case = draw_case(draw, program)
    started(ON_ONE_DEVICE + text_of(program, case))
    try:
        reference = reference_of(program)
        if covered is not None and draw.randrange(4):
            case = case_reaching(reference.traced, case, covered.reached)
        started(text_of(program, case))
        outcome: Outcome = check_case(reference, case)
    except NotImplementedError as error:
        record.refuse(str(error))
    except Exception as error:
        record.fail(error)
        raise Failure(program, case) from error
    else:
        record.add(outcome)
        if covered is not None:
            covered.add(outcome)
