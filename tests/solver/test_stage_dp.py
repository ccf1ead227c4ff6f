"""Stages on submeshes: as fast as the best of all assignments, on small problems."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from autopar.runtime.schedule import Task, one_f_one_b
from autopar.solver.stage_dp import least_step_seconds, solve_stages
from autopar.solver.stage_problem import (
    ScheduleName,
    Stage,
    StageChoice,
    StageProblem,
    microbatches_in_flight,
    step_seconds,
)
from benchmarks.stage_chain import simulate_schedule
from tests.marks import slow
from tests.solver.stage_counts import best_over


def random_problem(
    seed: int,
    num_layers: int,
    host_kinds: tuple[int, ...],
    devices_per_host: int,
    *,
    tight: bool = False,
    additive: bool = True,
) -> StageProblem:
    """Spans cost about the sum of their layers, less on more devices, and differ in how
    much: sublinear speedup, state split or not."""
    rng = np.random.default_rng(seed)
    work = rng.uniform(0.2, 2.0, num_layers)
    kept = rng.uniform(0.5, 1.5, num_layers)
    total = len(host_kinds) * devices_per_host
    sizes = [n for n in range(1, devices_per_host + 1)]
    sizes += [n for n in range(2 * devices_per_host, total + 1, devices_per_host)]
    choices = []
    for kind in sorted(set(host_kinds)):
        for size in sizes:
            for variant in range(2):
                speed = size ** rng.uniform(0.5, 1.0) * (1 + kind) / (1 + 0.2 * variant)
                shape = (num_layers + 1,) * 2
                seconds, once, fixed, each = (np.zeros(shape) for _ in range(4))
                for i in range(num_layers):
                    for j in range(i + 1, num_layers + 1):
                        noise = 1.0 if additive else rng.uniform(0.7, 1.3)
                        seconds[i, j] = work[i:j].sum() / speed * noise
                        once[i, j] = kept[i:j].sum() * (1 if variant else 1 / size)
                        fixed[i, j] = 3 * kept[i:j].sum() / (size if variant else 1)
                        each[i, j] = kept[i:j].sum() / size
                choices.append(
                    StageChoice((size, variant), size, seconds, once, fixed, each, kind)
                )
    bytes_ = rng.uniform(0.0, 1.0, num_layers + 1)
    return StageProblem(
        num_layers,
        host_kinds,
        devices_per_host,
        tuple(choices),
        np.stack([0.05 * bytes_, bytes_]),
        (0.001, 0.01),
        rng.uniform(20.0, 60.0) / total if tight else inf,
        int(rng.integers(1, 9)),
    )


def all_assignments(
    problem: StageProblem, first: int = 0, device: int = 0
) -> Iterator[tuple[Stage, ...]]:
    if first == problem.num_layers:
        yield ()
        return
    for index, choice in enumerate(problem.choices):
        if device < problem.num_devices and problem.may_start(choice, device):
            for end in range(first + 1, problem.num_layers + 1):
                for rest in all_assignments(problem, end, device + choice.num_devices):
                    yield (Stage(first, end, device, index), *rest)


def interleaved_assignments(problem: StageProblem) -> Iterator[tuple[Stage, ...]]:
    for index, choice in enumerate(problem.choices):
        submeshes = problem.num_devices // choice.num_devices
        starts = [i * choice.num_devices for i in range(submeshes)]
        if submeshes < 2 or problem.num_microbatches % submeshes:
            continue
        if not all(problem.may_start(choice, start) for start in starts):
            continue
        number = submeshes * problem.stages_per_submesh
        for cut in combinations(range(1, problem.num_layers), number - 1):
            spans = pairwise((0, *cut, problem.num_layers))
            yield tuple(
                Stage(i, j, starts[s % submeshes], index)
                for s, (i, j) in enumerate(spans)
            )


def least(problem: StageProblem, assignments: Iterator[tuple[Stage, ...]]) -> float:
    return min((step_seconds(problem, stages) for stages in assignments), default=inf)


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe"])
@pytest.mark.parametrize("hosts", [((0,), 4), ((0, 0), 2), ((0,), 3), ((0, 1), 2)])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize(
    ("seeds", "most_layers"),
    [(range(2), 4), slow(range(5), 6)],
)
def test_no_assignment_is_faster(
    schedule: ScheduleName,
    hosts: tuple[tuple[int, ...], int],
    tight: bool,
    seeds: range,
    most_layers: int,
):
    fits = 0
    for seed in seeds:
        layers = most_layers if hosts == ((0,), 3) else most_layers - 1
        random = random_problem(
            seed, layers, *hosts, tight=tight, additive=seed % 2 > 0
        )
        problem = replace(random, schedule=schedule)
        wanted = least(problem, all_assignments(problem))
        found = solve_stages(problem)
        if found is None:
            assert wanted == inf
            continue
        fits += 1
        assert found.seconds == pytest.approx(wanted, rel=1e-12)
        assert step_seconds(problem, found.stages) == found.seconds
        assert found.bound <= wanted
        assert least_step_seconds(problem) <= wanted * (1 + 1e-12)
    assert fits


@pytest.mark.parametrize("hosts", [((0,), 4), ((0, 0), 2)])
def test_six_layers_on_four_devices(hosts: tuple[tuple[int, ...], int]):
    """Of the size that row ALP-3 names; one choice a submesh keeps the search small."""
    random = random_problem(7, 6, *hosts, tight=True)
    problem = replace(random, choices=random.choices[1::2])
    wanted = least(problem, all_assignments(problem))
    found = solve_stages(problem)
    assert found is not None and wanted < inf
    assert found.seconds == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("tight", [False, True])
def test_no_interleaved_assignment_is_faster(tight: bool):
    for seed in range(6):
        random = random_problem(seed, 6, (0,), 4, tight=tight)
        problem = replace(
            random, schedule="interleaved", stages_per_submesh=2, num_microbatches=4
        )
        wanted = least(problem, interleaved_assignments(problem))
        found = solve_stages(problem)
        assert (found is None) == (wanted == inf)
        if found is not None:
            assert found.seconds == pytest.approx(wanted, rel=1e-12)
            assert least_step_seconds(problem) <= wanted * (1 + 1e-12)


def test_a_loose_gap_is_kept():
    for seed in range(2):
        problem = random_problem(seed, 5, (0, 0), 3)
        exact, loose = solve_stages(problem), solve_stages(problem, gap=0.05)
        assert exact is not None and loose is not None
        assert exact.seconds <= loose.seconds <= exact.seconds * 1.06


def test_submeshes_are_parts_of_one_host_or_whole_hosts():
    problem = random_problem(0, 5, (0, 0), 3)
    for stages in (solve_stages(replace(problem, min_stages=n)) for n in (1, 2, 3, 4)):
        assert stages is not None
        for stage in stages.stages:
            number = problem.choices[stage.choice].num_devices
            is_inside = stage.device // 3 == (stage.device + number - 1) // 3
            assert is_inside or (stage.device % 3, number % 3) == (0, 0)


def test_the_number_of_microbatches_and_the_schedule_are_in_the_search():
    """GPipe never wins where memory is short, and a slow start asks for more parts."""
    problem = random_problem(3, 4, (0,), 4, tight=True)

    def choices_of(number: int) -> tuple[tuple[StageChoice, ...], np.ndarray]:
        parts = tuple(
            replace(
                each,
                seconds=each.seconds / number + 0.01,
                microbatch_bytes=each.microbatch_bytes / number,
            )
            for each in problem.choices
        )
        return parts, problem.crossing_seconds / number

    schedules: tuple[tuple[ScheduleName, int], ...] = (
        ("1f1b", 1),
        ("gpipe", 1),
        ("interleaved", 2),
    )
    best = best_over(problem, choices_of, (1, 4, 8), schedules)
    assert best is not None
    each_best = []
    for number in (1, 4, 8):
        choices, crossing = choices_of(number)
        for schedule, shared in schedules:
            each = replace(
                problem,
                choices=choices,
                crossing_seconds=crossing,
                num_microbatches=number,
                schedule=schedule,
                stages_per_submesh=shared,
            )
            found = solve_stages(each)
            each_best.append(inf if found is None else found.seconds)
    assert best[1].seconds == pytest.approx(min(each_best), rel=1e-12)


def test_in_flight_microbatches_are_those_of_the_schedule():
    problem = random_problem(0, 4, (0,), 4)
    problem = replace(problem, num_microbatches=8)
    assert [microbatches_in_flight(problem, s, 4) for s in range(4)] == [4, 3, 2, 1]
    gpipe = replace(problem, schedule="gpipe")
    assert [microbatches_in_flight(gpipe, s, 4) for s in range(4)] == [8] * 4
    shared = replace(problem, schedule="interleaved", stages_per_submesh=2)
    assert [microbatches_in_flight(shared, s, 8) for s in range(4)] == [11, 9, 7, 5]


@pytest.mark.parametrize("gap", [0.0, 0.02])
def test_interleaved_stages_keep_to_a_gap(gap: float):
    for seed in range(12):
        problem = replace(
            random_problem(seed, 6, (0, 0), 2),
            schedule="interleaved",
            stages_per_submesh=2,
            num_microbatches=4,
        )
        best = least(problem, interleaved_assignments(problem))
        found = solve_stages(problem, gap)
        assert found is not None and found.seconds <= best * (1 + gap + 1e-9)
        assert found.bound <= best * (1 + 1e-9)


def test_equal_stages_take_what_a_simulation_of_their_schedule_takes():
    """A device a stage, forward and backward; nothing is sent."""
    number = 4
    spans = np.triu(np.subtract.outer(np.arange(5), np.arange(5)) * -1.0)
    none = np.zeros_like(spans)
    choice = StageChoice(0, 1, 3 * spans, none, none, none)
    problem = StageProblem(
        *(number, (0,), number, (choice,), np.zeros((2, 5)), (0.0, 0.0), inf, 16),
        min_stages=number,
    )
    found = solve_stages(problem)
    assert found is not None

    def task_seconds(task: Task) -> float:
        return {"forward": 1.0, "backward": 2.0}.get(task.kind, 0.0)

    simulation = simulate_schedule(one_f_one_b(number, 16), task_seconds)
    taken = simulation.timeline.makespan_seconds
    assert found.seconds == pytest.approx(taken, rel=1e-12)
