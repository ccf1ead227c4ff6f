"""What a command that takes long says meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.status import Status


@contextmanager
def progress(console: Console) -> Iterator[Status]:
    """A line that moves on a terminal; what autopar logs is printed above it."""
    log = logging.getLogger("autopar")
    handler = _Printed(Console(stderr=True, highlight=False, soft_wrap=True))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with console.status("starting jax") as status:
            yield status
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _Printed(logging.Handler):
    """Prints records with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console, self.start = console, perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        seconds = perf_counter() - self.start
        line = f"{seconds:6.1f} s  {record.getMessage()}"
        self.console.print(line, style="dim", markup=False)
