"""Run a script on a local Ray cluster of virtual hosts: `autopar launch`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def launch(
    script: Path, arguments: Sequence[str], num_hosts: int, devices_per_host: int
) -> int:
    """Run `script` with a local cluster that `Cluster.ray()` finds; its exit code.

    Each host is a set of processes of this machine with `devices_per_host` virtual CPU
    devices. All of them end with the script, or with this process. A script that a
    signal ended counts as 128 plus the signal's number, as in a shell.

    Raises:
      ValueError: no such script, or a number below one.
      ImportError: ray is not installed.
    """
    if not script.is_file():
        raise ValueError(
            f"The script to launch must be a Python file, but {str(script)!r} is none; "
            f"write `autopar launch --hosts 2 --devices-per-host 4 train.py`."
        )
    from autopar.runtime.ray_local import local_ray_hosts

    # Starting the cluster sets Ray's own handler of signals: ours comes after.
    with local_ray_hosts(num_hosts, devices_per_host) as hosts, _signals_raised():
        environment = {**os.environ, "RAY_ADDRESS": hosts.address}
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments], env=environment
        )
        try:
            code = process.wait()
        finally:
            _end(process)
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_raised() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: not before the cluster is down."""

    def raise_it(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the script to end, and insist after a while."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
