"""Published tables: stages, schedules, links inside a host, and what we change."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.runtime.simulate import simulate_schedule
from benchmarks.models import gpt, moe
from benchmarks.published.constants import Constants
from benchmarks.published.fit import START
from benchmarks.published.host_links import LANES_BY_KIND, link_of
from benchmarks.published.pipeline_time import Outcome, cluster_of
from benchmarks.published.prediction import _changes, predict_table, simulators_of
from benchmarks.published.schedules import (
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    StageSeconds,
    held_at_most,
    makespan,
    schedule_of,
)
from benchmarks.published.simulated_plan import Plan
from benchmarks.published.stage_bounds import balanced_bounds, is_cut
from benchmarks.published.systems import with_schedules
from benchmarks.published.table import read_table
from benchmarks.published.unit_costs import Layout
from benchmarks.published.unit_model import gpt_units, moe_units

ONE = Layout(1, 1, 1, 1)


def stage_seconds(forward: Sequence[float], sent: float = 0.0) -> StageSeconds:
    """Backward takes twice as long as forward, half of it for weights."""
    ones = np.array(forward, float)
    border = np.array([sent] * (len(ones) - 1) + [0.0])
    return StageSeconds(ones, 2 * ones, ones, border, 0 * ones)


def outcome(forward: Sequence[float], sent: float, microbatches: int) -> Outcome:
    plan = Plan((ONE,) * len(forward), microbatches)
    return Outcome(plan, stage_seconds(forward, sent), 0.0, 1.0, ())


def whole(seconds: StageSeconds, name: str, submeshes: int, number: int) -> float:
    """The whole schedule, task by task."""
    schedule = schedule_of(name, len(seconds.forward), submeshes, number)
    rest = seconds.weight if schedule.has_weight_tasks else 0 * seconds.weight
    by_kind = {
        "forward": seconds.forward,
        "backward": seconds.backward - rest,
        "weight": seconds.weight,
        "apply": seconds.update,
    }
    return simulate_schedule(
        schedule,
        lambda task: by_kind[task.kind][task.stage],
        lambda send: seconds.sent[min(send.source, send.target)],
    ).timeline.makespan_seconds


@pytest.mark.parametrize("sent", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("forward", [(1, 1, 1, 1), (1, 2, 1), (1.5, 1, 1, 1, 0.5)])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_the_formula_is_near_the_schedule(
    forward: Sequence[float], sent: float, microbatches: int
) -> None:
    found = outcome(forward, sent, microbatches)
    exact = whole(found.stages, ONE_F_ONE_B, len(forward), microbatches)
    assert 0.99 * exact <= found.seconds <= exact * (1.02 + 1.2 / microbatches)
    assert found.simulated_seconds == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("name", [ONE_F_ONE_B, INTERLEAVED, *ZERO_BUBBLE])
@pytest.mark.parametrize("sent", [0.0, 0.1])
def test_a_long_step_is_a_few_rounds_and_their_period(name: str, sent: float) -> None:
    submeshes, microbatches = 4, 48
    chunks = 2 if name == INTERLEAVED else 1
    seconds = stage_seconds([1.0, 1.2, 1.0, 0.9] * chunks, sent)
    found = makespan(name, seconds, submeshes, microbatches)
    exact = whole(seconds, name, submeshes, microbatches)
    assert found == pytest.approx(exact, rel=0.01)


def test_bubbles_shrink_as_published() -> None:
    """Narayanan et al. 2021, section 2.2; Qi et al. 2023, table 2.

    Stages of ZB-H2 have no bubble, but the last begins and ends later than the first.
    """
    stages, number = 4, 16
    busy = 3.0 * number
    chunks = stage_seconds([0.5] * 2 * stages)
    bubbles = {
        name: makespan(
            name, chunks if name == INTERLEAVED else stage_seconds([1] * 4), 4, number
        )
        - busy
        for name in (ONE_F_ONE_B, INTERLEAVED, *ZERO_BUBBLE)
    }
    assert bubbles[ONE_F_ONE_B] == pytest.approx((stages - 1) * 3)
    assert bubbles[INTERLEAVED] == pytest.approx((stages - 1) * 3 / 2)
    assert bubbles["ZB-H1"] == pytest.approx(stages - 1)
    assert bubbles["ZB-H2"] == pytest.approx(stages - 1)


def test_schedules_hold_what_their_papers_say() -> None:
    """In microbatches of one stage: p - i, all p, and 2p - 1."""
    held = [1.0] * 4
    assert held_at_most(ONE_F_ONE_B, held, 4, 32) == [4, 3, 2, 1]
    assert max(held_at_most("ZB-H1", held, 4, 32)) == 4
    assert max(held_at_most("ZB-H2", held, 4, 32)) == 7
    assert held_at_most(INTERLEAVED, [0.5] * 8, 4, 32)[0] > 4


def test_other_schedules_are_offered_where_they_can_be() -> None:
    plan = Plan((ONE,) * 4, 8)
    names = [(each.schedule, each.num_chunks) for each in with_schedules(plan)]
    assert names == [*((n, 1) for n in ZERO_BUBBLE), (INTERLEAVED, 2), (INTERLEAVED, 4)]
    assert not list(with_schedules(Plan((ONE,), 8)))
    uneven = with_schedules(replace(plan, num_microbatches=6))
    assert INTERLEAVED not in {each.schedule for each in uneven}


def test_stages_are_dealt_out_so_that_the_slowest_is_fast() -> None:
    busy = np.array([1.0, 2, 2, 2, 1, 4])
    anywhere = np.ones(6, bool)
    bounds = balanced_bounds([busy, busy, busy / 2], anywhere)
    assert bounds is not None
    stages = [busy[a:b].sum() for a, b in zip(bounds, bounds[1:], strict=False)]
    stages[2] /= 2
    assert max(stages) == pytest.approx(4.5) or max(stages) <= 5


def test_stages_end_where_they_may() -> None:
    busy = np.ones(6)
    cuts = np.array([True, True, False, True, True, True])
    assert balanced_bounds([busy] * 2, cuts) in ((0, 2, 6), (0, 4, 6))
    assert balanced_bounds([busy] * 6, cuts) is None
    assert balanced_bounds([busy] * 5, cuts) == (0, 1, 2, 4, 5, 6)


def test_no_stage_ends_among_experts() -> None:
    """Between their two products masks of all tokens by slots would cross."""
    config = replace(moe.Config.tiny(), num_layers=4, hidden=16)
    for model in (moe_units(config), gpt_units(gpt.Config.tiny())):
        borders = np.array(model.border_bytes)[list(model.sequence)]
        names = [model.units[unit].name for unit in model.sequence]
        barred = {
            name for name, ok in zip(names, is_cut(borders), strict=True) if not ok
        }
        assert barred == ({"experts up"} if model.has_experts else set())


def test_every_device_has_six_lanes() -> None:
    table = np.array(LANES_BY_KIND["V100"])
    assert (table == table.T).all() and (table.sum(axis=1) == 6).all()


@pytest.mark.parametrize(
    ("layout", "lanes"),
    [((1, 2, 2, 1), 1), ((1, 4, 4, 1), 4), ((1, 8, 8, 1), 6), ((1, 8, 2, 4), 1)],
)
def test_a_ring_has_the_lanes_of_its_group(
    layout: tuple[int, int, int, int], lanes: int
) -> None:
    """Of two neighbours one, of four four, of eight all six; of 0 and 4 two, 2 and 6
    one: the slowest ring counts."""
    each = Layout(*layout)
    cluster = cluster_of(each, "V100", START)
    found = link_of(cluster, each.mesh, ("data",))
    line = cluster.host_link.seconds_per_byte
    assert found.seconds_per_byte == pytest.approx(line * 6 / lanes)
    assert found.exchange_seconds_per_byte is not None
    assert found.exchange_seconds_per_byte >= found.seconds_per_byte


def test_hosts_of_other_kinds_join_all_devices_alike() -> None:
    each = Layout(1, 4, 4, 1)
    cluster = cluster_of(each, "A100", START)
    own = cluster.link(each.mesh, ("data",))
    assert link_of(cluster, each.mesh, ("data",)) == own


def test_what_was_changed_is_named_with_what_it_was() -> None:
    alpa = outcome([1, 1], 0.0, 8)
    layouts = (Layout(1, 2, 1, 2),) * 4
    plan = replace(
        alpa.plan, layouts=layouts, remat=False, schedule=INTERLEAVED, num_chunks=2
    )
    text = _changes(alpa, replace(alpa, plan=plan))
    assert text == (
        "schedule: interleaved (1F1B); remat: none (full); stages: 8 on 4 submeshes "
        "(2 on 2 submeshes); GPUs a submesh: 2 (1); data x tensor: 1x2 (1x1)"
    )
    assert _changes(alpa, alpa) == "nothing"


def test_our_plan_is_compared_with_alpas_or_the_first_columns(tmp_path: Path) -> None:
    """A table of Megatron's alone; its plan is the one to beat."""
    head = "# 4x A100 per host, 100 Gbps between hosts, seq 64, vocab 128, batch 16"
    columns = "gpus,layers,hidden,heads,tp,pp,microbatches,TFLOPS/GPU,pflop_per_iter"
    path = tmp_path / "megatron.csv"
    path.write_text("\n".join([head, columns, "4,4,64,4,2,2,4,1.0,1e-6"]))
    table, constants = read_table(path), Constants.of_kind("A100")
    found = predict_table(
        table, simulators_of(table, constants), constants, with_ours=True
    )
    (cell,), (ours,) = found.cells, found.ours
    assert (cell.column, ours.column) == ("megatron", "megatron")
    assert cell.plan.startswith("2x(1;2) as (1;2), 4 microbatches")
    assert ours.ratio is not None and ours.ratio >= 1
    assert "OOM" not in str(ours)
