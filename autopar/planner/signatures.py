"""What a user is told of a function's signatures as they are planned."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax

from .planned import Planned

_log = logging.getLogger("autopar")
_MANY_SIGNATURES = 8  # from then on a user should know that each is compiled


def tell_user(planned: Sequence[Planned]) -> None:
    """Logs the roles of a function's first signature, and when there are many."""
    if len(planned) == 1:
        _log.info(planned[0].summary())
        for note in planned[0].roles.notes:
            _log.warning(note)
    if len(planned) == _MANY_SIGNATURES + 1:
        _log.warning(_many_signatures(planned[0], planned[-1], _MANY_SIGNATURES))


def _many_signatures(first: Planned, latest: Planned, number: int) -> str:
    """What to tell a user whose function is compiled again and again."""
    name, changed = first.traced.name, "its constants or the tree of its arguments"
    if first.traced.in_tree == latest.traced.in_tree:
        types = zip(first.argument_types, latest.argument_types, strict=True)
        path, (old, new) = next(
            (path, pair)
            for path, pair in zip(first.traced.input_paths, types, strict=True)
            if pair[0] != pair[1] or pair[0].weak_type != pair[1].weak_type
        )
        changed = f"{path}, which was {_type_text(old)} and is {_type_text(new)}"
    return (
        f"{name} should be called with few kinds of arguments, as each is planned and "
        f"compiled, but by now it was with more than {number}: what changed is "
        f"{changed}. Pad batches to a few sizes, and pass numbers as arrays."
    )


def _type_text(kind: jax.ShapeDtypeStruct) -> str:
    return f"{'weak ' * kind.weak_type}{kind.dtype.name}{list(kind.shape)}"
