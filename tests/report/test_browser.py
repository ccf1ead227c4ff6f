"""Reports in a Chromium: no error, nothing fetched, and what opens, opens.

The browser is that of `AUTOPAR_CHROMIUM`, or the first of PATH. `AUTOPAR_SCREENSHOTS`
names a folder to keep the screenshots of the documentation in.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from autopar.steps.parallel_plan import Plan
from benchmarks.models import build
from tests.report.chromium import VARIABLE, Tab, find_chromium, open_page
from tests.report.steps import NEEDED
from tests.tiny_plans import make_plan

pytest.importorskip("plotly", reason=NEEDED)
pytest.importorskip("jinja2", reason=NEEDED)
CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no Chromium in PATH, nor named by {VARIABLE}"
)
WIDTH = 1100
# Pictures show all there is, which takes longer.
SCREENSHOTS = os.environ.get("AUTOPAR_SCREENSHOTS")
FULL = SCREENSHOTS is not None
PLOTS = "[...document.querySelectorAll('.plot')]"
# Elements that hide a part of what they hold, and those that end beyond the window.
CUT_OFF = """[...document.querySelectorAll('main, main *')].filter(e =>
  e.checkVisibility() && !e.closest('.plot') && (
    (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible')
    || e.getBoundingClientRect().right > innerWidth + 1)).map(e => e.outerHTML)"""
# Words of figures that the figure's edge cuts off.
CUT_LABELS = f"""{PLOTS}.flatMap(e => [...e.querySelectorAll('text')].filter(text => {{
  const [inside, outside] = [text, e].map(x => x.getBoundingClientRect());
  return inside.left < outside.left - 1 || inside.right > outside.right + 1;
}}).map(text => text.textContent))"""
LAYER = "state.params['layers'][0]['attention']['query']['kernel']"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workload = build("gpt", num_layers=2 if FULL else 1)
    step = autopar.parallelize(workload.step, mesh="x:2;y:4", memory_budget="4MiB")
    path = tmp_path_factory.mktemp("gpt") / "plan.html"
    step.plan(*workload.abstract()).report(path, alternatives=FULL, audit=FULL)
    return path


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workload = build("gpt" if FULL else "mlp")
    method = autopar.PipelineParallel(num_stages=4, num_microbatches=8)
    step = autopar.parallelize(workload.step, mesh="x:2", method=method)
    path = tmp_path_factory.mktemp("stages") / "plan.html"
    step.plan(*workload.abstract()).report(path, alternatives=False, audit=False)
    return path


def opened(path: Path, folder: Path) -> Iterator[Tab]:
    assert CHROMIUM is not None
    with open_page(CHROMIUM, path.as_uri(), folder, WIDTH) as tab:
        tab.wait_for("document.documentElement?.dataset.ready === 'true'")
        yield tab


@pytest.fixture(scope="module")
def gpt_tab(gpt: Path) -> Iterator[Tab]:
    yield from opened(gpt, gpt.parent / "profile")


@pytest.fixture(scope="module")
def stages_tab(stages: Path) -> Iterator[Tab]:
    yield from opened(stages, stages.parent / "profile")


def keep(tab: Tab, name: str, first: str, last: str, folder: Path) -> None:
    """A screenshot from the top of one section to the end of another."""
    target = Path(SCREENSHOTS or folder) / f"{name}.png"
    tab.value("(document.activeElement.blur(), scrollTo(0, 0))")
    top = tab.value(f"{first}.getBoundingClientRect().top + scrollY") - 12
    end = tab.value(f"{last}.getBoundingClientRect().bottom + scrollY") + 12
    tab.screenshot(target, top, end - top, WIDTH)
    assert target.read_bytes().startswith(b"\x89PNG")


def section(name: str) -> str:
    return f"document.getElementById('{name}')"


def test_a_report_opens_offline_without_an_error(gpt: Path, gpt_tab: Tab) -> None:
    assert gpt_tab.problems == []
    assert gpt_tab.requests == [gpt.as_uri()]
    plots = "document.querySelectorAll('.plot .main-svg').length"
    assert gpt_tab.value(plots) >= 2
    assert gpt_tab.value("document.querySelectorAll('.plot script').length") == 0


def test_a_layer_is_opened_by_keyboard(gpt_tab: Tab, tmp_path: Path) -> None:
    path = LAYER.replace("'", "\\'")
    find = (
        "[...document.querySelectorAll('#arguments code')]"
        f".findLast(e => e.textContent === '{path}')"
    )
    visible = f"{find}.checkVisibility()"
    assert not gpt_tab.value(visible)
    hidden = (
        "(() => { const own = []; "
        f"for (let e = {find}; e; e = e.parentElement) "
        "if (e.tagName === 'DETAILS' && !e.open) own.unshift(e); return own; })()"
    )
    assert gpt_tab.value(f"{hidden}.length") >= 1
    whole = section("arguments")
    keep(gpt_tab, "report-arguments", whole, whole, tmp_path)
    while gpt_tab.value(f"{hidden}.length"):
        gpt_tab.value(f"{hidden}[0].querySelector('summary').focus()")
        gpt_tab.press("Enter")
    assert gpt_tab.value(visible)
    gpt_tab.value("document.querySelector('[data-close]').click()")
    assert not gpt_tab.value(visible)
    gpt_tab.value("document.querySelector('[data-open]').click()")
    assert gpt_tab.value(visible)
    assert gpt_tab.problems == []


def test_a_heading_sorts_by_keyboard(gpt_tab: Tab) -> None:
    table = section("collective-lines")
    heads = gpt_tab.value(f"[...{table}.tHead.rows[0].cells].map(e => e.innerText)")
    column = next(i for i, head in enumerate(heads) if head.startswith("bytes"))
    head = f"{table}.tHead.rows[0].cells[{column}]"
    values = f"[...{table}.tBodies[0].rows].map(r => +r.cells[{column}].dataset.value)"
    gpt_tab.value(f"{head}.querySelector('button').focus()")
    gpt_tab.press("Enter")
    found = gpt_tab.value(values)
    assert len(found) > 2 and found == sorted(found, reverse=True)
    assert gpt_tab.value(f"{head}.getAttribute('aria-sort')") == "descending"
    gpt_tab.press("Enter")
    assert gpt_tab.value(values) == sorted(found)
    assert gpt_tab.value(f"{head}.getAttribute('aria-sort')") == "ascending"


def test_nothing_stands_out_of_the_page(gpt_tab: Tab, stages_tab: Tab) -> None:
    for tab in (gpt_tab, stages_tab):
        tab.value("folded = [...document.querySelectorAll('details:not([open])')]; 0")
        tab.value("folded.forEach(e => e.open = true)")
        for width in (WIDTH, 390, WIDTH):
            tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            # Figures follow a little later.
            tab.wait_for(f"document.documentElement.scrollWidth <= {width}")
            assert tab.value(f"Math.min(...{PLOTS}.map(e => e.clientHeight))") > 100
            assert tab.value(CUT_OFF) == [], width
            tab.wait_for(f"{CUT_LABELS}.length === 0")
        tab.value("folded.forEach(e => e.open = false)")
        tab.call("Emulation.clearDeviceMetricsOverride")


def test_a_dark_page_is_dark_and_its_figures_too(gpt_tab: Tab, tmp_path: Path) -> None:
    def lightness(expression: str) -> float:
        text = gpt_tab.value(expression)
        return sum(float(n) for n in text.split("(")[1].rstrip(")").split(",")[:3])

    page = "getComputedStyle(document.body).backgroundColor"
    label = "getComputedStyle(document.querySelector('.plot .gtitle, .plot text')).fill"
    assert lightness(page) > lightness(label)
    gpt_tab.call(
        "Emulation.setEmulatedMedia",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    gpt_tab.wait_for(f"{page} !== 'rgb(255, 255, 255)'")
    gpt_tab.wait_for(f"{label} !== 'rgb(29, 33, 41)'")
    assert lightness(page) < lightness(label)
    keep(gpt_tab, "report-dark", section("memory"), section("figure-memory"), tmp_path)
    gpt_tab.call("Emulation.setEmulatedMedia", features=[])
    gpt_tab.wait_for(f"{page} === 'rgb(255, 255, 255)'")
    gpt_tab.wait_for(f"{label} === 'rgb(29, 33, 41)'")
    assert gpt_tab.problems == []


def test_screenshots_of_one_program(gpt_tab: Tab, tmp_path: Path) -> None:
    keep(
        gpt_tab,
        "report-headline",
        "document.querySelector('h1')",
        section("devices"),
        tmp_path,
    )
    keep(gpt_tab, "report-lines", section("compute"), section("collectives"), tmp_path)
    keep(
        gpt_tab, "report-memory", section("memory"), section("figure-memory"), tmp_path
    )
    keep(
        gpt_tab,
        "report-alternatives",
        section("alternatives"),
        section("alternatives"),
        tmp_path,
    )
    assert gpt_tab.problems == []


def test_screenshots_of_a_pipeline(
    stages: Path, stages_tab: Tab, tmp_path: Path
) -> None:
    assert stages_tab.requests == [stages.as_uri()]
    bars = stages_tab.value(
        "document.querySelectorAll('#figure-timeline .point').length"
    )
    assert bars == 4 * (8 + 8 + 1)
    keep(stages_tab, "report-stages", section("devices"), section("devices"), tmp_path)
    keep(
        stages_tab,
        "report-stage-memory",
        section("memory"),
        section("figure-memory"),
        tmp_path,
    )
    assert stages_tab.problems == []


def test_a_loaded_plan_opens_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    Plan(make_plan()).report(path)
    for tab in opened(path, tmp_path / "profile"):
        assert tab.problems == []
        assert tab.value("document.querySelectorAll('.plot').length") == 0
