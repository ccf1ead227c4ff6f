"""The folder in which autopar keeps what it made, and how a file is put there."""

from __future__ import annotations

import gzip
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

VARIABLE = "AUTOPAR_CACHE_DIR"
_OFF = ("off", "0", "none", "")
_log = logging.getLogger("autopar")


def cache_folder() -> Path | None:
    """The folder of the cache; None if it is switched off."""
    given = os.environ.get(VARIABLE)
    if given is not None and given.strip().lower() in _OFF:
        return None
    return base_folder()


def base_folder() -> Path:
    """The folder of the cache, also where nothing is cached."""
    given = os.environ.get(VARIABLE)
    if given is not None and given.strip().lower() not in _OFF:
        return Path(given).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "autopar"


def store_file(path: Path, text: str, most: int) -> None:
    """Write a compressed file at once, and keep the newest `most` of its folder.

    A folder that cannot be written is told once.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(text.encode(), 3))
        os.replace(name, path)
        files = list(path.parent.glob("*.gz"))
        files.sort(key=lambda each: each.stat().st_mtime)
        for each in files[: max(len(files) - most, 0)]:
            each.unlink(missing_ok=True)
    except OSError as error:
        _warn_unwritable(str(path.parent), str(error))


@cache
def _warn_unwritable(folder: str, reason: str) -> None:
    _log.warning(
        "nothing is kept in the cache, as %s cannot be written (%s); set %s to another "
        "folder, or to off",
        *(folder, reason, VARIABLE),
    )
