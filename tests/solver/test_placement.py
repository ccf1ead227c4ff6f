"""Placements of operators: exact ones equal brute force, searches are never worse."""

from functools import cache
from itertools import product

import networkx as nx
import numpy as np
import pytest

from autopar.solver.placement import (
    HEURISTICS,
    NoPlacement,
    Placed,
    PlacementProblem,
    best_placement,
    exact,
    heuristic,
    placed,
    search,
)
from tests.marks import slow


def problem(
    seconds: np.ndarray,
    edges: tuple[tuple[int, int, float], ...],
    *,
    sizes: np.ndarray | None = None,
    capacity: float = np.inf,
    per_byte: float = 0.0,
    latency: float = 0.0,
    together: tuple[tuple[int, ...], ...] = (),
) -> PlacementProblem:
    number, devices = seconds.shape
    apart = 1.0 - np.eye(devices)
    return PlacementProblem(
        tuple(f"op{i}" for i in range(number)),
        seconds,
        edges,
        np.zeros(number) if sizes is None else sizes,
        np.full(devices, capacity),
        latency * apart,
        per_byte * apart,
        together,
    )


def fork_join(seed: int, **options: object) -> PlacementProblem:
    """One operator, six beside each other, one that reads them all; two devices."""
    numbers = np.random.default_rng(seed)
    seconds = np.repeat(numbers.integers(1, 9, (8, 1)).astype(float), 2, axis=1)
    size = numbers.integers(1, 5, 7).astype(float)
    fork = tuple((0, i, float(size[i - 1])) for i in range(1, 7))
    join = tuple((i, 7, float(size[i])) for i in range(1, 7))
    return problem(seconds, (*fork, *join), **options)  # type: ignore[arg-type]


def random_dag(seed: int, per_byte: float = 0.0) -> PlacementProblem:
    numbers = np.random.default_rng(seed)
    seconds = np.repeat(numbers.integers(1, 10, (12, 1)).astype(float), 3, axis=1)
    edges = tuple(
        (i, j, float(numbers.integers(1, 5)))
        for i in range(12)
        for j in range(i + 1, 12)
        if numbers.random() < 0.25
    )
    return problem(seconds, edges, per_byte=per_byte)


def brute_force(given: PlacementProblem) -> float:
    """The least step time over every placement and every order of the operators."""
    graph = nx.DiGraph((a, b) for a, b, _ in given.edges)
    every = np.array(
        [
            devices
            for devices in product(range(given.num_devices), repeat=len(given.names))
            if given.is_allowed(devices)
        ]
    )
    rows = np.arange(len(every))
    best = np.inf
    for order in nx.all_topological_sorts(graph):
        free = np.zeros((len(every), given.num_devices))
        ends = np.zeros((len(every), len(given.names)))
        for op in order:
            at = every[:, op]
            start = free[rows, at]
            for producer, size in given.inputs[op]:
                source = every[:, producer]
                moved = given.latency[source, at]
                moved = moved + size * given.seconds_per_byte[source, at]
                start = np.maximum(start, ends[:, producer] + moved)
            ends[:, op] = free[rows, at] = start + given.seconds[op, at]
        best = min(best, float(ends.max(axis=1).min()))
    return best


@cache
def free_and_best(seed: int) -> tuple[PlacementProblem, Placed]:
    free = fork_join(seed, per_byte=0.5, latency=0.5)
    return free, exact(free)


seeds = pytest.mark.parametrize("seed", [0, *(slow(n) for n in (1, 2))])


@seeds
def test_plc_1_a_fork_and_join_is_placed_as_brute_force_does(seed: int) -> None:
    free, found = free_and_best(seed)
    assert found.step_seconds == pytest.approx(brute_force(free), rel=1e-5)
    # A cap of half the bytes and one operator more forbids what was best, or nothing.
    sizes = np.array([1.0, 4, 4, 4, 4, 4, 4, 1])
    tight = fork_join(seed, per_byte=0.5, latency=0.5, sizes=sizes, capacity=13.0)
    capped = exact(tight)
    assert tight.is_allowed(capped.devices)
    assert capped.step_seconds == pytest.approx(brute_force(tight), rel=1e-5)
    assert capped.step_seconds >= found.step_seconds - 1e-9


def test_plc_1_what_fits_nowhere_names_the_largest_operator() -> None:
    sizes = np.array([1.0, 4, 4, 9, 4, 4, 4, 1])
    too_tight = fork_join(0, sizes=sizes, capacity=8.0)
    for method in ("exact", "search", *HEURISTICS):
        with pytest.raises(NoPlacement, match="the largest is op3 with 9 bytes of 31"):
            best_placement(too_tight, method)


def test_plc_2_list_scheduling_is_within_grahams_bound() -> None:
    for seed in range(50):
        free = random_dag(seed)
        found = heuristic(free, "list")
        path = nx.dag_longest_path_length(
            nx.DiGraph((a, b, {"weight": free.seconds[b, 0]}) for a, b, _ in free.edges)
        )
        least = max(path, free.seconds[:, 0].sum() / free.num_devices)
        assert found.step_seconds <= 2 * least


def test_plc_2_a_search_is_never_worse_than_its_start_and_repeats() -> None:
    for seed in range(4):
        given = random_dag(seed, per_byte=0.5)
        found = search(given, seed=3, moves=200)
        for method in HEURISTICS:
            assert found.step_seconds <= heuristic(given, method).step_seconds
        assert found == search(given, seed=3, moves=200)
        assert given.is_allowed(found.devices)


@seeds
def test_plc_2_no_heuristic_beats_the_exact_placement(seed: int) -> None:
    given, best = free_and_best(seed)
    for method in ("search", *HEURISTICS):
        found = best_placement(given, method)
        assert found.step_seconds >= best.step_seconds * (1 - 1e-5)


def test_plc_3_pins_and_groups_are_kept() -> None:
    for seed in range(8):
        numbers = np.random.default_rng(seed)
        base = random_dag(seed, per_byte=0.5)
        seconds = base.seconds.copy()
        pinned, home = int(numbers.integers(12)), int(numbers.integers(3))
        seconds[pinned, [d for d in range(3) if d != home]] = np.inf
        group = tuple(int(i) for i in numbers.choice(12, 3, replace=False))
        given = problem(seconds, base.edges, per_byte=0.5, together=(group,))
        for method in HEURISTICS:
            devices = best_placement(given, method).devices
            assert devices[pinned] == home
            assert len({devices[op] for op in group}) == 1
        devices = search(given, moves=100).devices
        assert devices[pinned] == home and len({devices[op] for op in group}) == 1


def test_plc_3_a_group_that_pins_tear_apart_is_refused() -> None:
    seconds = np.array([[1.0, np.inf], [np.inf, 1.0]])
    with pytest.raises(NoPlacement, match="op0, op1 are allowed on none in common"):
        problem(seconds, (), together=((0, 1),))


def test_plc_5_a_slower_device_gets_as_much_less() -> None:
    seconds = np.ones((50, 1)) * np.array([[1.0, 4.0]])
    for method in ("topological", "list", "search"):
        devices = np.array(best_placement(problem(seconds, ()), method).devices)
        ratio = (devices == 0).sum() / (devices == 1).sum()
        assert ratio == pytest.approx(4.0, rel=0.2), method


def test_a_timeline_runs_one_operator_at_a_time_and_waits_for_values() -> None:
    given = problem(np.ones((3, 2)), ((0, 1, 2.0), (0, 2, 2.0)), per_byte=1.0)
    here = placed(given, [0, 0, 0])
    assert here.step_seconds == 3
    apart = placed(given, [0, 0, 1])
    assert apart.starts == (0.0, 1.0, 3.0)
    assert apart.step_seconds == 4
