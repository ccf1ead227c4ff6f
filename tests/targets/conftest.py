"""What is compiled for devices that are not here: skipped where no compiler is.

`make test-targets` sets AUTOPAR_TARGETS, and then it is an error if it is missing.
"""

import logging
import os
from collections.abc import Iterator

import pytest

from autopar.targets import compilers

_MESSAGE = "compiling %s for %s"
_compiled: list[str] = []
_skipped: list[str] = []


@pytest.fixture(autouse=True, scope="session")
def counted() -> Iterator[None]:
    """Notes each program that goes to a compiler."""

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == _MESSAGE:
                _compiled.append(record.getMessage())

    log, handler = logging.getLogger("autopar"), Counting()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def compiler(counted: None, request: pytest.FixtureRequest) -> None:
    platform = getattr(request.module, "PLATFORM", "cuda")
    if compilers.find(platform) is None:
        pytest.skip(f"no compiler for {platform} is installed: make test-targets")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "/targets/" in report.nodeid:
        _skipped.append(report.nodeid)


def _may_skip() -> bool:
    is_asked_for = os.environ[compilers.VARIABLE] != "off"
    return not is_asked_for or os.environ.get("AUTOPAR_NO_TARGETS") == "1"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped and not _may_skip():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not (_compiled or _skipped):
        return
    terminalreporter.write_line(f"{len(_compiled)} compiled, {len(_skipped)} skipped")
    if _skipped and not _may_skip():
        terminalreporter.write_line(
            "The tests of targets must run, but the compilers are missing; set "
            "AUTOPAR_NO_TARGETS=1 to go without."
        )
