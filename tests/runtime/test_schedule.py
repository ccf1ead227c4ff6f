"""Schedules run each task once, in an order that can be run, at the known makespans."""

from collections.abc import Callable

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.plans.plan import TaskKind
from autopar.runtime.schedule import (
    Schedule,
    Task,
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
)
from benchmarks.stage_chain import has_weight_tasks, simulate_schedule

Sizes = st.integers(1, 6)


def _interleaved(num_stages: int, num_microbatches: int) -> Schedule:
    """Two stages a submesh."""
    multiple = num_stages * num_microbatches
    return interleaved(2 * num_stages, multiple, num_submeshes=num_stages)


Schedules = pytest.mark.parametrize(
    "make_schedule",
    [gpipe, one_f_one_b, eager_1f1b, _interleaved, zero_bubble_h1, zero_bubble_h2],
    ids=lambda f: f.__name__,
)


def _seconds(stages_a_submesh: int = 1) -> Callable[[Task], float]:
    """Unit costs of the acceptance rows: forward 1, backward 2, of a whole submesh."""
    costs = {"forward": 1.0, "backward": 2.0, "apply": 0.0}
    return lambda task: costs[task.kind] / stages_a_submesh


def _with_weights(task: Task) -> float:
    """Backward in two parts of the same time as forward."""
    return 0.0 if task.kind == "apply" else 1.0


def _dependencies(schedule: Schedule) -> nx.DiGraph:
    """What must come before what: in a row, along the chain, and back."""
    graph = nx.DiGraph()
    for row in schedule.rows:
        nx.add_path(graph, row)
    last = schedule.num_stages - 1
    for i in range(schedule.num_microbatches):
        chain = [Task(s, i, "forward") for s in range(last + 1)]
        chain += [Task(s, i, "backward") for s in range(last, -1, -1)]
        nx.add_path(graph, chain)
        if has_weight_tasks(schedule):
            for s in range(last + 1):
                nx.add_path(graph, [Task(s, i, "backward"), Task(s, i, "weight")])
    return graph


@Schedules
@given(num_stages=Sizes, num_microbatches=Sizes)
def test_each_task_runs_once_and_none_waits_for_itself(
    make_schedule: Callable[[int, int], Schedule],
    num_stages: int,
    num_microbatches: int,
) -> None:
    schedule = make_schedule(num_stages, num_microbatches)
    tasks = [task for row in schedule.rows for task in row]
    kinds: list[TaskKind] = ["forward", "backward"]
    if has_weight_tasks(schedule):
        kinds.append("weight")
    wanted = {
        Task(stage, microbatch, kind)
        for stage in range(schedule.num_stages)
        for kind in kinds
        for microbatch in range(schedule.num_microbatches)
    } | {Task(stage, None, "apply") for stage in range(schedule.num_stages)}
    assert len(tasks) == len(wanted)
    assert set(tasks) == wanted
    assert nx.is_directed_acyclic_graph(_dependencies(schedule))


@given(num_stages=Sizes, num_microbatches=Sizes)
def test_in_flight_microbatches_and_makespan_are_the_known_ones(
    num_stages: int, num_microbatches: int
) -> None:
    p, m = num_stages, num_microbatches
    early = simulate_schedule(one_f_one_b(p, m), _seconds())
    late = simulate_schedule(gpipe(p, m), _seconds())
    assert early.peak_microbatches == tuple(min(m, p - i) for i in range(p))
    assert late.peak_microbatches == (m,) * p
    assert early.timeline.makespan_seconds == 3 * (m + p - 1)
    assert late.timeline.makespan_seconds == 3 * (m + p - 1)
    assert early.timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("sent", [0.0, 0.5, 1.0])
def test_eager_1f1b_does_not_wait_for_what_is_sent(sent: float) -> None:
    """A microbatch takes 3 on each of 4 stages, and twice `sent` on each border."""
    seconds = lambda schedule: simulate_schedule(  # noqa: E731
        schedule, _seconds(), lambda _: sent
    )
    plain, eager = seconds(one_f_one_b(4, 41)), seconds(eager_1f1b(4, 41))
    through = 3 * 4 + 2 * sent * 3
    assert eager.peak_microbatches == (7, 5, 3, 1)
    assert eager.timeline.makespan_seconds == pytest.approx(through + 40 * 3)
    assert plain.timeline.makespan_seconds == pytest.approx(through + 40 * through / 4)


def test_gpi_4_the_bubble_of_gpipe() -> None:
    for num_microbatches, makespan, ideal in ((8, 33, 24), (16, 57, 48)):
        found = simulate_schedule(gpipe(4, num_microbatches), _seconds())
        assert found.timeline.makespan_seconds == makespan
        assert [found.timeline.busy_seconds(stage) for stage in range(4)] == [ideal] * 4
        assert found.peak_microbatches == (num_microbatches,) * 4


def test_meg_5_1f1b_and_interleaved() -> None:
    found = simulate_schedule(one_f_one_b(4, 8), _seconds())
    assert found.timeline.makespan_seconds == 33
    assert found.peak_microbatches[0] == 4
    for chunks, makespan, peak in ((2, 28.5, 5.5), (4, 26.25, 4.75)):
        schedule = interleaved(4 * chunks, 8, num_submeshes=4)
        found = simulate_schedule(schedule, _seconds(chunks))
        assert found.timeline.makespan_seconds == makespan
        assert found.peak_microbatches[0] / chunks == peak


def test_meg_5_zero_bubble() -> None:
    first = simulate_schedule(zero_bubble_h1(4, 8), _with_weights)
    assert first.timeline.makespan_seconds == 27
    assert first.peak_microbatches == (4,) * 4
    second = simulate_schedule(zero_bubble_h2(4, 8), _with_weights)
    assert second.peak_microbatches == (7,) * 4
    for submesh in range(4):
        tasks = [e for e in second.timeline.events if e.submesh == submesh]
        tasks = [e for e in tasks if e.task.kind != "apply"]
        span = max(e.end for e in tasks) - min(e.start for e in tasks)
        assert span == second.timeline.busy_seconds(submesh)


@settings(max_examples=40)
@given(num_stages=Sizes, extra=st.integers(0, 9))
def test_zero_bubble_leaves_a_third_of_the_bubble_or_none_inside(
    num_stages: int, extra: int
) -> None:
    p, m = num_stages, num_stages + extra
    first = simulate_schedule(zero_bubble_h1(p, m), _with_weights)
    assert first.timeline.makespan_seconds == 3 * m + (p - 1)
    assert max(first.peak_microbatches) == min(p, m)
    m = 2 * p + extra
    second = simulate_schedule(zero_bubble_h2(p, m), _with_weights)
    assert max(second.peak_microbatches) == 2 * p - 1
    assert second.timeline.makespan_seconds == 3 * m + (p - 1)


@pytest.mark.parametrize("make", [zero_bubble_h1, zero_bubble_h2])
def test_weight_parts_of_many_microbatches_follow_their_backwards(
    make: Callable[[int, int], Schedule],
) -> None:
    """As many as take minutes if each is looked up among all tasks."""
    late = {"zero_bubble_h1": 1, "zero_bubble_h2": 2}[make.__name__]
    for stage, row in enumerate(make(4, 4000).rows):
        position = {task: i for i, task in enumerate(row)}
        for number in range(4000 - late * stage):
            behind = position[Task(stage, number + late * stage, "backward")]
            assert position[Task(stage, number, "weight")] == behind + 1


@pytest.mark.parametrize("text", ["2F0", "0B13", "1W2", "7A"])
def test_a_task_prints_and_parses_back(text: str) -> None:
    assert str(Task.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2A1", "2X0"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 2F0 or 2A"):
        Task.parse(text)


def test_a_schedule_prints_as_a_grid() -> None:
    assert str(one_f_one_b(2, 3)) == (
        "one_f_one_b\n"
        "submesh 0: 0F0  0F1  0B0  0F2  0B1  0B2  0A\n"
        "submesh 1: 1F0  1B0  1F1  1B1  1F2  1B2  1A"
    )


def test_forward_only_has_no_backward() -> None:
    found = simulate_schedule(forward_only(3, 4), _seconds())
    assert found.timeline.makespan_seconds == 6


def test_a_schedule_that_makes_no_sense_is_refused() -> None:
    a, b = Task(0, 0, "forward"), Task(0, 1, "forward")
    with pytest.raises(ValueError, match="0F0 came more often"):
        Schedule("twice", 1, 1, ((a, a),))
    with pytest.raises(ValueError, match=r"stages \[0\] of 'torn'"):
        Schedule("torn", 1, 2, ((a,), (b,)))
    with pytest.raises(ValueError, match="cannot run 0F1"):
        Schedule("long", 1, 1, ((a, b),))
    with pytest.raises(ValueError, match="use 8"):
        interleaved(8, 6, num_submeshes=4)
    with pytest.raises(ValueError, match="6 stages for 4 submeshes"):
        interleaved(6, 4, num_submeshes=4)
    with pytest.raises(ValueError, match="one stage and one microbatch"):
        gpipe(0, 1)
