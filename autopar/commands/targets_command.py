"""`autopar targets`: compilers for devices that are not here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..targets import compilers

targets = typer.Typer(
    help="Compilers for devices that are not here: list, add and remove.",
    invoke_without_command=True,
)
_PLATFORM = Annotated[
    str, typer.Argument(help=f"One of {', '.join(compilers.PLATFORMS)}.")
]


@targets.callback()
def show(context: typer.Context) -> None:
    """List what can be compiled for: autopar plan ... --compile."""
    if context.invoked_subcommand is not None:
        return
    from ..targets.target import known_kinds

    for platform in compilers.PLATFORMS:
        found = compilers.find(platform)
        if found is None:
            words = f"not installed; run: autopar targets add {platform}"
        else:
            words = str(found.folder or "in this environment")
        print(f"{platform}: {words}\n  for {', '.join(known_kinds(platform))}")


@targets.command()
def add(
    platform: _PLATFORM,
    path: Annotated[
        Path | None,
        typer.Option(
            help=f"Another folder than that of the cache; set {compilers.VARIABLE} to "
            "it where autopar is to find it."
        ),
    ] = None,
    cudnn: Annotated[
        bool, typer.Option(help="cuDNN too (717 MB), for fused attention.")
    ] = False,
) -> None:
    """Install the compilers of a platform, beside this environment and not in it.

    About 220 MB come from the package index. The installed jax stays as it is.
    """
    if path is not None:
        os.environ[compilers.VARIABLE] = str(path)
    print(f"installing {' '.join(compilers.requirements(platform, cudnn=cudnn))}")
    print(f"written to {compilers.add(platform, cudnn=cudnn)}")


@targets.command()
def remove(platform: _PLATFORM) -> None:
    """Remove the compilers of a platform, of all versions of jax."""
    folders = compilers.remove(platform)
    print("\n".join(f"removed {folder}" for folder in folders) or "nothing to remove")
