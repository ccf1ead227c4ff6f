"""What a command that takes long says meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import perf_counter

from rich.console import Console
from rich.status import Status

MOST_SILENT = 10.0  # seconds
_LOOKS = 0.5  # seconds between two


@contextmanager
def progress(console: Console) -> Iterator[Status]:
    """A line that moves on a terminal; what autopar logs is printed above it.

    Elsewhere a line comes at least every `MOST_SILENT` seconds.
    """
    log = logging.getLogger("autopar")
    handler = _Printed(Console(stderr=True, highlight=False, soft_wrap=True))
    before, is_over = log.level, Event()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    watch = Thread(target=_break_silence, args=(handler, is_over), daemon=True)
    try:
        if not console.is_terminal:
            watch.start()
        with console.status("starting jax") as status:
            yield status
    finally:
        is_over.set()
        log.removeHandler(handler)
        log.setLevel(before)


class _Printed(logging.Handler):
    """Prints records with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console, self.start = console, perf_counter()
        self.latest = self.start

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(record.getMessage())

    def tell(self, text: str) -> None:
        self.latest = perf_counter()
        seconds = self.latest - self.start
        self.console.print(f"{seconds:6.1f} s  {text}", style="dim", markup=False)


def _break_silence(handler: _Printed, is_over: Event) -> None:
    while not is_over.wait(_LOOKS):
        if perf_counter() - handler.latest > MOST_SILENT - _LOOKS:
            handler.tell("still at it")
