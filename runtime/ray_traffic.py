"""How many bytes of arrays pass through the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.lowering.exported_program import ShardedType

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


@dataclass
class Traffic:
    """Bytes of arrays that passed through the driver, and the largest of them."""

    to_hosts: int = 0
    from_hosts: int = 0
    largest_array: int = 0

    def count(self, argument: Any, is_sent: bool) -> None:
        """Add the arrays in the arguments of a call, or in what it returned."""
        for nbytes in _array_bytes(argument):
            self.largest_array = max(self.largest_array, nbytes)
            self.to_hosts += nbytes if is_sent else 0
            self.from_hosts += 0 if is_sent else nbytes


def _array_bytes(value: Any) -> list[int]:
    """The sizes of the arrays in what is sent or returned."""
    if type(value) in _PLAIN:
        return []
    if isinstance(value, Mapping):
        return [n for each in value.values() for n in _array_bytes(each)]
    if isinstance(value, tuple | list):
        return [n for each in value for n in _array_bytes(each)]
    if hasattr(value, "nbytes") and not isinstance(value, ShardedType):
        return [value.nbytes]
    if hasattr(value, "__dataclass_fields__"):
        return [n for each in vars(value).values() for n in _array_bytes(each)]
    return []
