"""What random bits hold in programs of XLA's CPU backend.

It draws them in a loop over the rounds of threefry2x32: two words of four bytes for
each element, and their next values. Readers make bits of the two words, and all that is
cheap after, each for itself, so the words are what is kept.
"""

from __future__ import annotations

import numpy as np

from ..graph.op_graph import GraphColumns, Operator

WORDS_BYTES = 8  # of an element
KEYS_BYTES = 24  # of an element with a key of its own: those of the rounds, twice


def drawing_rows(columns: GraphColumns) -> np.ndarray:
    """Rows of the operators that draw random bits."""
    return np.flatnonzero(columns.where(lambda op: op.kind == "random_bits"))


def drawing_bytes(op: Operator) -> int:
    """What drawing holds besides the words, all of it on one device."""
    has_keys = op.operand_types[0].rank > 0
    return op.result_types[0].size * (WORDS_BYTES + has_keys * KEYS_BYTES)


def bytes_of_tensors(columns: GraphColumns) -> np.ndarray:
    """[tensors] bytes of each, all of it on one device."""
    whole = np.array([kind.bytes for kind in columns.types], np.int64)[columns.type_of]
    sizes = np.array([kind.size for kind in columns.types], np.int64)[columns.type_of]
    drawn = columns.results[columns.result_start[drawing_rows(columns)]]
    whole[drawn] = WORDS_BYTES * sizes[drawn]
    return whole
