"""Reads tables of TOML files into dataclasses; errors name the file and the field."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autopar.clusters.hardware import nearest
from autopar.errors import ClusterFileError

_T = TypeVar("_T")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; raises ClusterFileError if it is none."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ClusterFileError(
            f"cluster file {path} does not exist; for known devices use "
            "Cluster.preset('8x8xH100')."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ClusterFileError(
            f"cluster file {path} must be a TOML file, but reading it failed: {error}."
        ) from error


def table_at(table: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The table at a name; raises ClusterFileError if something else is there."""
    value = table[name]
    if not isinstance(value, Mapping):
        raise ClusterFileError(
            f"{where}: `{name}` must be a table, but got {value!r}; write [{name}]."
        )
    return value


def build(make: type[_T], table: Mapping[str, Any], where: str, prefix: str) -> _T:
    """A dataclass from its fields; errors name `where` and the field after `prefix`."""
    check_fields(make, table, where, prefix)
    try:
        return make(**table)
    except ValueError as error:
        text = str(error).replace("`", f"`{prefix}", 1)
        raise ClusterFileError(f"{where}: {text}") from None


def check_fields(
    make: type[Any], table: Mapping[str, Any], where: str, prefix: str
) -> None:
    """Raises ClusterFileError if a field is unknown or missing."""
    fields = dataclasses.fields(make)
    names = [f.name for f in fields]
    for name in table:
        if name not in names:
            raise ClusterFileError(
                f"{where}: field `{prefix}{name}` is unknown"
                f"{nearest(name, names)}; fields are {', '.join(names)}."
            )
    for f in fields:
        defaults = {f.default, f.default_factory}
        if f.name not in table and defaults == {dataclasses.MISSING}:
            raise ClusterFileError(f"{where}: field `{prefix}{f.name}` is missing.")
