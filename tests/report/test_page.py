"""Pages: one file, complete, with the plan's own numbers, safe and offline."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import autopar
from autopar.clusters.cluster import Cluster
from autopar.option_values import default_budget
from autopar.plans.explain import format_seconds
from autopar.plans.plan import InputPlan, ShardingPlan
from autopar.report import page as pages
from autopar.report.figures import memory_figure, packed_plotly
from autopar.report.findings import MemoryCurve
from autopar.sharding.mesh import MeshShape
from autopar.steps.parallel_plan import Plan
from tests.report.html_pages import Page
from tests.report.steps import (
    NEEDED,
    SECTIONS,
    arguments,
    paths_in,
    step,
    written,
)
from tests.tiny_plans import WHOLE, make_plan

graph_objects = pytest.importorskip("plotly.graph_objects", reason=NEEDED)
pytest.importorskip("jinja2", reason=NEEDED)

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\"'<b>"


def test_every_section_is_there_and_every_link_leads_to_one(page: Page) -> None:
    ids = [found["id"] for _, found in page.elements if found.get("id")]
    assert set(SECTIONS) <= set(ids)
    assert len(set(ids)) == len(ids), "an id is given once"
    links = [str(found["href"]) for name, found in page.elements if name == "a"]
    assert links == [f"#{name}" for name in SECTIONS]
    assert not page.unclosed


@pytest.mark.parametrize("name", ["page", "pipeline_page"])
def test_nothing_is_fetched(name: str, request: pytest.FixtureRequest) -> None:
    found: Page = request.getfixturevalue(name)
    for element, attributes in found.elements:
        assert "src" not in attributes and element not in ("link", "img", "iframe")
        assert str(attributes.get("href", "#")).startswith("#")
    (policy,) = [
        str(attributes["content"])
        for element, attributes in found.elements
        if element == "meta" and "http-equiv" in attributes
    ]
    assert policy.startswith("default-src 'none'")
    (style,) = found.texts["style"]
    assert "url(" not in style and "@import" not in style
    assert len(found.text) < 3_000_000


def test_the_headline_has_the_plans_own_numbers(planned: Plan, page: Page) -> None:
    predicted = planned.predicted
    assert float(page.value("predicted-step")) == predicted.step_seconds
    assert float(page.value("predicted-compute")) == predicted.compute_seconds
    assert float(page.value("predicted-collectives")) == predicted.collective_seconds
    assert int(page.value("predicted-peak")) == predicted.peak_bytes
    assert int(page.value("predicted-budget")) == 200 << 10
    assert float(page.value("predicted-gap")) == predicted.optimality_gap
    assert "method" in page.texts["dt"] and "Auto()" in page.texts["dd"]


@pytest.mark.parametrize("name", ["planned", "pipeline"])
def test_every_argument_is_there_by_its_whole_path(
    name: str, request: pytest.FixtureRequest
) -> None:
    plan: Plan = request.getfixturevalue(name)
    found: Page = request.getfixturevalue({"planned": "page"}.get(name, f"{name}_page"))
    leaves = {
        f"state['{tree}'][{layer}]"
        for tree in ("params", "moments")
        for layer in range(4)
    }
    assert leaves | {"x"} <= paths_in(found)
    if isinstance(plan.decision, ShardingPlan):
        assert {each.path for each in plan.sharding.inputs} <= paths_in(found)


def test_lines_of_the_table_add_up_too(planned: Plan, page: Page) -> None:
    for table, total in (
        ("collective-lines", planned.predicted.collective_seconds),
        ("compute-lines", planned.predicted.compute_seconds),
    ):
        seconds = sum(page.numbers(table, "seconds"))
        assert seconds == pytest.approx(total, rel=1e-4)
    sent = sum(page.numbers("collective-lines", "bytes"))
    assert sent == planned.predicted.collective_bytes
    held = sum(page.numbers("users of one device", "bytes"))
    assert held == planned.predicted.peak_bytes
    kinds = ("parameters", "optimizer state", "batch")
    for table in ("groups", "leaves"):
        bytes_ = (sum(page.numbers(f"{table} of {k}", "bytes a device")) for k in kinds)
        assert sum(bytes_) == sum(each.bytes for each in planned.sharding.inputs)


@pytest.mark.parametrize("visible_fraction", [0.5, 1.0])
def test_what_is_sent_and_what_is_waited_for_are_told_apart(
    visible_fraction: float, tmp_path: Path
) -> None:
    cluster = replace(Cluster.preset("8xH100"), visible_fraction=visible_fraction)
    method = autopar.DataParallel()
    parallel = autopar.parallelize(step, cluster=cluster, method=method)
    plan = parallel.plan(*arguments())
    found = written(plan, tmp_path, alternatives=False, audit=False)
    waited = plan.predicted.collective_seconds
    assert float(found.value("predicted-collectives")) == waited
    text = found.text_by_id["collectives"]
    sent = sum(found.numbers("collective-lines", "seconds"))
    assert f", {format_seconds(sent)}; a heading sorts" in text
    has_words = "Cluster.visible_fraction" in text
    assert has_words == (sent > waited) == (visible_fraction < 1)
    if has_words:
        assert float(found.value("waited-seconds")) == pytest.approx(waited)
        assert f"{format_seconds(waited)}: 50% of gathering parameters" in text
        hidden = f"; {format_seconds(sent - waited)} more is hidden beside compute"
        assert hidden in found.text_by_id["headline"]


def test_loops_of_unknown_length_are_told_beside_the_sum(tmp_path: Path) -> None:
    def halved(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) > 1.0, lambda x: 0.5 * (x @ weights) @ weights.T, x
        )

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    parallel = autopar.parallelize(halved, mesh="x:8", pins={"weights": "[-, x]"})
    found = written(parallel.plan(*shapes), tmp_path, alternatives=False, audit=False)
    text = found.text_by_id["collectives"]
    assert "loops of unknown length are taken to run 10 times" in text


def test_the_budget_is_that_of_the_plan_wherever_its_devices_are(
    tmp_path: Path,
) -> None:
    cluster = Cluster.preset("8xH100")
    for given, budget in ((None, default_budget(cluster)), ("1GiB", 1 << 30)):
        parallel = autopar.parallelize(step, cluster=cluster, memory_budget=given)
        plan = parallel.plan(*arguments())
        assert plan.predicted.budget_bytes == budget
        found = written(plan, tmp_path, alternatives=False, audit=False)
        assert int(found.value("predicted-budget")) == budget
        assert "budget is known" not in found.text


def test_figures_hold_the_curve_and_the_tasks(page: Page, pipeline_page: Page) -> None:
    figures = [json.loads(each) for each in page.texts["script"] if each[:2] == '{"']
    names = [[trace["name"] for trace in figure["data"]] for figure in figures]
    memory = ["arguments and results", "all that is held", "budget 200 KiB"]
    assert [n for n in names[0] if not n.startswith("peak ")] == memory
    assert not names[1:]
    for shown, figure in zip(names, figures, strict=True):
        assert all(f"</i>{name}</span>" in page.text for name in shown)
        graph_objects.Figure(figure)  # raises where plotly has no such field
    timeline = json.loads(
        next(each for each in pipeline_page.texts["script"] if each[:2] == '{"')
    )
    assert [trace["name"] for trace in timeline["data"]] == [
        "forward",
        "backward",
        "apply",
    ]
    assert sum(len(trace["x"]) for trace in timeline["data"]) == 2 * (4 + 4 + 1)
    graph_objects.Figure(timeline)


def test_named_methods_stand_beside_the_plan(planned: Plan, page: Page) -> None:
    plans = page.column("alternative-plans", "plan")
    assert plans[0] == "this plan" and "DataParallel()" in plans
    ratios = page.column("alternative-plans", "times")
    assert ratios[0] == "1.00"
    gap = 1 + planned.predicted.optimality_gap
    assert all(float(each) * gap >= 0.99 for each in ratios if each != "–")
    assert page.text_by_id["alternatives"].strip().endswith("nothing was pinned.")


def test_it_says_why_with_the_runner_up_that_explain_finds(
    planned: Plan, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    titles = page.column("choices", "choice")
    assert titles[0].startswith("dot_general") and "which takes all_reduce" in titles[1]
    tensor = titles[1].split(",")[0]
    planned.explain(tensor=tensor)
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "the runner-up  " in line]
    for heading in ("runner-up", "step", "compute", "collectives", "peak memory"):
        assert page.column("choices", heading)[1] in row


def test_it_takes_less_than_three_seconds(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "packed_plotly", packed_plotly)

    def seconds() -> float:
        start = time.process_time()
        planned.report(tmp_path / "plan.html")
        return time.process_time() - start

    assert seconds() < 3 or seconds() < 3  # what else runs here costs time too


def test_pins_have_their_price(tmp_path: Path) -> None:
    pins = {"x": "[-, x]"}
    parallel = autopar.parallelize(step, mesh="x:2;y:4", pins=pins)
    found = written(parallel.plan(*arguments()), tmp_path, audit=False)
    costs = parallel.pin_costs(*arguments())
    assert found.column("pins", "pin") == ["x"]
    assert found.numbers("pins", "step without it") == [costs.costs[0].seconds_without]
    assert found.numbers("pins", "it costs") == [costs.costs[0].seconds]


def test_the_program_is_audited_where_its_devices_are(page: Page) -> None:
    text = page.text_by_id["audit"]
    assert "as planned, or explained" in text and "NOT" not in text
    assert "Memory of the compiled program" in text


def test_each_stage_program_is_audited(pipeline_page: Page) -> None:
    text = pipeline_page.text_by_id["audit"]
    for stage in range(2):
        for kind in ("forward", "backward", "apply"):
            assert f"stage {stage}, {kind}" in text
    assert "as planned, or explained" in text


def test_without_the_devices_the_audit_says_so(tmp_path: Path) -> None:
    cluster = Cluster.preset("2x8xH100")
    parallel = autopar.parallelize(step, cluster=cluster, mesh="x:2;y:8")
    plan = parallel.plan(*arguments())
    found = written(plan, tmp_path, alternatives=False)
    text = found.text_by_id["audit"]
    assert "cannot be compiled here" in text and "needs 16 devices" in text
    assert "alternatives=False" in found.text_by_id["alternatives"]


def test_a_loaded_plan_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(make_plan()).save(path)
    found = written(Plan.load(path), tmp_path)
    for section in ("memory", "alternatives", "audit"):
        assert "--target MODULE:NAME" in found.text_by_id[section]
    assert set(SECTIONS) <= set(found.text_by_id)
    assert float(found.value("predicted-step")) == 5e-6
    leaves = {"params['layer_0']['w']", "params['layer_1']['w']", "x"}
    assert leaves <= paths_in(found)
    assert found.column("largest-arguments", "bytes a device")[0] == "256 B"


def test_a_loaded_pipeline_says_that_its_timeline_takes_the_step(
    pipeline: Plan, tmp_path: Path
) -> None:
    found = written(Plan(pipeline.decision), tmp_path)
    text = found.text_by_id["devices"]
    assert "a plan file does not hold its step" in text
    assert "0F0" in text and set(found.column("stages", "in flight")) == {"–"}


def test_a_plan_for_a_cluster_of_ones_own_has_bytes_and_no_seconds(
    tmp_path: Path,
) -> None:
    plan = replace(make_plan(), cluster="our own machines")
    found = written(Plan(plan), tmp_path)
    assert set(found.column("collective-lines", "seconds")) == {"–"}
    assert "--cluster FILE" in found.text_by_id["collectives"]
    assert "hosts are not known" in found.text_by_id["devices"]


def test_plans_and_audits_that_are_given_are_shown(
    planned: Plan, tmp_path: Path
) -> None:
    compiled = autopar.parallelize(step, mesh="x:2;y:4").lower(*arguments()).compile()
    loaded = Plan(planned.decision)
    other = {"mine <b>": Plan(make_plan())}
    found = written(loaded, tmp_path, alternatives=other, audit=compiled.audit())
    assert found.column("alternative-plans", "plan") == ["this plan", "mine <b>"]
    assert found.column("alternative-plans", "mesh")[1] == "data:2;model:2"
    assert "as planned, or explained" in found.text_by_id["audit"]


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    plan = make_plan(MeshShape((f"data{HOSTILE}", "model"), (2, 2)))
    leaf = InputPlan(f"state['{HOSTILE}'][0]", "state", WHOLE, (4,), 16)
    operators = tuple(
        replace(op, name=f"{op.name}{HOSTILE}", source=HOSTILE) for op in plan.operators
    )
    collectives = tuple(
        replace(each, source=f"t {HOSTILE}") for each in plan.collectives
    )
    plan = replace(
        plan,
        function=f"step{HOSTILE}",
        cluster=HOSTILE,
        inputs=(leaf, *plan.inputs),
        operators=operators,
        collectives=collectives,
    )
    others = {f"plan{HOSTILE}": Plan(plan)}
    found = written(Plan(plan), tmp_path, alternatives=others)
    names = {name for name, _ in found.elements}
    assert not names & {"img", "b"}
    assert {f"step{HOSTILE}", leaf.path} <= paths_in(found)
    assert HOSTILE in found.column("collective-lines", "source line")
    assert f"plan{HOSTILE}" in found.column("alternative-plans", "plan")


def test_hostile_labels_stay_inside_their_figure() -> None:
    curve = MemoryCurve(HOSTILE, 0, (1, 2), (HOSTILE, "b"), ())
    figure = memory_figure([curve], 0).json
    assert "<" not in figure
    label, *_ = json.loads(figure)["data"][1]["customdata"]
    assert "&lt;img" in label, "plotly reads markup in labels"


@pytest.mark.parametrize("name", ["plotly", "jinja2"])
def test_without_its_packages_the_remedy_is_told_and_nothing_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=re.escape("pip install 'autopar[report]'")):
        Plan(make_plan()).report(tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())


def test_a_primitive_without_a_rule_is_told(tmp_path: Path) -> None:
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)

    def step(state: jax.Array, x: jax.Array) -> Any:
        return state + mystery.bind(x).sum(), x.sum()

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    with pytest.warns(autopar.FallbackWarning, match="'mystery' has no sharding rule"):
        plan = autopar.parallelize(step, mesh="x:8").plan(*shapes)
    found = written(plan, tmp_path, alternatives=False, audit=False)
    assert "'mystery' has no sharding rule" in found.text_by_id["cautions"]


def test_a_plan_without_leaves_lines_or_stages_is_a_page_too(tmp_path: Path) -> None:
    empty = replace(make_plan(), inputs=(), operators=(), collectives=())
    found = written(Plan(empty), tmp_path)
    assert set(SECTIONS) <= set(found.text_by_id)
    assert "every device works on its own" in found.text_by_id["collectives"]
