"""`autopar calibrate`: measure the devices here, and keep what was measured.

jax is imported inside: `autopar --help` does without.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def calibrate(
    output: Annotated[
        Path | None,
        typer.Option(
            "--out", "--output", help="Write the cluster file there; else it is shown."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="Measure this number of virtual CPU devices instead."),
    ] = None,
) -> None:
    """Measure this machine: what products, memory and collectives take.

    Takes about half a minute, with every device at work; let nothing else run. The
    file is read by autopar.Cluster.load and by --cluster. It describes one host: for
    several, set num_hosts and add a table [network_link], as in the presets.

    Example:

    \b
        autopar calibrate --out my.toml
        autopar plan train:for_autopar --cluster my.toml
    """
    from ..clusters.virtual_devices import use_virtual_devices

    if devices is not None:
        use_virtual_devices(devices)
    from ..clusters.cluster_file import to_toml
    from . import calibrate as measuring

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    is_here = sys.stderr.isatty() or output is not None
    with console.status("measuring"):
        cluster = measuring.calibrate(
            tell=lambda line: console.print(line, style="dim") if is_here else None
        )
    comment = f"{cluster.source}\nWritten by autopar calibrate; numbers may be edited."
    text = to_toml(cluster, comment)
    if output is None:
        print(text, end="")
        return
    output.write_text(text)
    print(f"{cluster}\n\nwritten to {output}")
