"""One plan of a program and one of a pipeline, with their pages."""

from collections.abc import Iterator
from functools import cache

import pytest

import autopar
from autopar.report import page as pages
from autopar.report.figures import packed_plotly
from autopar.steps.parallel_plan import Plan
from tests.report.html_pages import Page
from tests.report.steps import arguments, step, written


@pytest.fixture(scope="session", autouse=True)
def _plotly_is_packed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "packed_plotly", cache(packed_plotly))
        yield


@pytest.fixture(scope="session")
def planned() -> Plan:
    parallel = autopar.parallelize(step, mesh="x:2;y:4", memory_budget="200KiB")
    return parallel.plan(*arguments())


@pytest.fixture(scope="session")
def page(planned: Plan, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return written(planned, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="session")
def pipeline() -> Plan:
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    return autopar.parallelize(step, mesh="x:4", method=method).plan(*arguments())


@pytest.fixture(scope="session")
def pipeline_page(pipeline: Plan, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return written(pipeline, tmp_path_factory.mktemp("report"))
