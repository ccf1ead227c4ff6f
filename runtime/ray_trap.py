"""A fault at a chosen point of a worker, for tests and benchmarks of recovery."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from .instructions import Instruction, Receive, Run, Send


@dataclass(frozen=True)
class Trap:
    """Sends the process a signal, once, some seconds after it gets to a point.

    Points are "load", "save", "transfer", and the kinds of tasks: "forward",
    "backward", "apply". The time of the signal, in seconds since the epoch, is written
    to `note` before.
    """

    point: str
    signal: int
    delay_seconds: float
    note: str

    def spring(self) -> None:
        """Start the delay."""
        threading.Timer(self.delay_seconds, self._send).start()

    def _send(self) -> None:
        Path(self.note).write_text(str(time.time()))
        os.kill(os.getpid(), self.signal)


def point_of(instruction: Instruction) -> str:
    """The point that a worker is at when it executes an instruction."""
    if isinstance(instruction, Send | Receive):
        return "transfer"
    return instruction.task.kind if isinstance(instruction, Run) else ""
