"""Torn ways, against a walk along each of them."""

import random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from autopar.costs.torn_paths import torn_rows
from autopar.graph.op_graph import GraphColumns


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_torn_where_a_way_to_a_reader_is(seed: int) -> None:
    random_ = random.Random(seed)
    count = random_.randrange(4, 40)
    near = random_.choice((4, 40))
    reads = [
        random_.sample(range(max(0, k - near), k), min(k, random_.choice((1, 1, 2, 3))))
        for k in range(count)
    ]
    reordered = [[random_.random() < 0.1 for _ in read] for read in reads]
    fusable, repeats, asked = (
        np.array([random_.random() < share for _ in range(count)])
        for share in (0.85, 0.6, 0.5)
    )
    listed = np.array([value for read in reads for value in read], np.intp)
    columns = SimpleNamespace(
        operators=range(count),
        type_of=np.zeros(count),
        results=np.arange(count),
        rows_of_results=np.arange(count),
        rows_of_operands=np.repeat(np.arange(count), list(map(len, reads))),
        operands=listed,
    )
    is_reordered = np.array([each for row in reordered for each in row], bool)
    found = torn_rows(
        *(cast(GraphColumns, columns), fusable, repeats, asked, is_reordered)
    )
    readers = [[r for r in range(count) if k in reads[r]] for k in range(count)]

    def is_torn(reader: int, made: int) -> bool:
        ends = not fusable[made] or (len(readers[made]) > 1 and not repeats[made])
        return bool(ends or not fusable[reader])

    def has_torn_way(reader: int, made: int) -> bool:
        """Whether one of all ways from `made` to `reader` is torn."""
        for each in reads[reader]:
            if each == made and is_torn(reader, made):
                return True
            leads = made in _makers(reads, each)
            if leads and (is_torn(reader, each) or has_torn_way(each, made)):
                return True
        return False

    for k in range(count):
        own = [r for r in readers[k] if not reordered[r][reads[r].index(k)]]
        is_asked = asked[k] and len(readers[k]) > 1
        expected = is_asked and any(has_torn_way(r, k) for r in own)
        assert found[k] == expected


def _makers(reads: list[list[int]], row: int) -> set[int]:
    """All that a row is made of."""
    found = set(reads[row])
    for each in reads[row]:
        found |= _makers(reads, each)
    return found
