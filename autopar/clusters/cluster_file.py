"""Writes a cluster as the TOML file that `Cluster.load` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from .cluster import Cluster


def to_toml(cluster: Cluster, comment: str = "", *, is_part: bool = False) -> str:
    """The file's text; `comment` is put at its head, line by line.

    A cluster of one host, unless it is a part of another, has no network link in its
    file: it is the host's.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    fields = {k: v for k, v in vars(cluster).items() if k not in ("ray_hosts", "parts")}
    if cluster.parts:
        fields = {"name": cluster.name}
    elif cluster.num_hosts == 1 and not is_part:
        del fields["network_link"]
    lines += _table("", fields)
    for part in cluster.parts:
        table = to_toml(part, is_part=True).replace("\n[", "\n[parts.")
        lines += ["", "[[parts]]", table.rstrip()]
    return "\n".join(lines) + "\n"


def _table(path: str, fields: Mapping[Any, Any]) -> Iterator[str]:
    """A table's own fields, then the tables in it."""
    inner = {k: vars(v) if is_dataclass(v) else v for k, v in fields.items()}
    tables = {k: v for k, v in inner.items() if isinstance(v, Mapping)}
    own = [f"{k} = {_value(v)}" for k, v in inner.items() if k not in tables]
    yield from ["", f"[{path}]"] if path and own else []
    yield from own
    for name, table in tables.items():
        yield from _table(f"{path}.{name}".lstrip("."), table)


def _value(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'"{escaped}"'
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if value == float(f"{value:.4g}") else repr(float(value))
