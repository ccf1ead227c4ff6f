"""Which sources of data the hosts of a Ray cluster read for themselves."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np

from .examples import Examples, HostSource, is_tree_of_arrays

_log = logging.getLogger("autopar")


def host_source(
    examples: Examples, num_ahead: int, end: int | None, is_asked: bool
) -> HostSource | None:
    """What hosts read the examples with; None where this process does it.

    It does, unless it `is_asked` to leave it to them, where examples are in its memory
    or cannot be sent.

    Raises:
      TypeError: hosts are asked to, and the source cannot be sent.
    """
    if not is_asked and _is_in_memory(examples.source):
        return None
    from autopar.runtime.ray_sources import packed

    try:
        sent = packed(examples)
    except TypeError as error:
        if is_asked:
            raise
        _log.warning("this process reads the examples for all hosts: %s", error)
        return None
    return HostSource(examples, sent, num_ahead, end)


def _is_in_memory(source: Any) -> bool:
    if is_tree_of_arrays(source):
        leaves = jax.tree.leaves(source)
        in_memory = (
            isinstance(leaf, jax.Array)
            or (isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap))
            for leaf in leaves
        )
        return any(in_memory)
    return isinstance(source, list | tuple)
