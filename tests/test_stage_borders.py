"""Where stages begin: as fast as the best of all partitions, and cheap to cross."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.pipelines.layers import NEAR, stage_borders


def stage_costs(costs: list[int], borders: list[int]) -> list[int]:
    return [sum(costs[a:b]) for a, b in pairwise([0, *borders, len(costs)])]


@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=9), st.integers(1, 4), st.data()
)
def test_no_partition_has_a_faster_slowest_stage(
    costs: list[int], num_stages: int, data: st.DataObject
):
    bytes_ = data.draw(
        st.lists(st.integers(0, 3), min_size=len(costs), max_size=len(costs))
    )
    if sum(cost > 0 for cost in costs) < num_stages:
        with pytest.raises(ValueError, match="at most the number of products"):
            stage_borders(costs, bytes_, num_stages)
        return
    chosen = stage_borders(costs, bytes_, num_stages)
    assert len(chosen) == num_stages - 1 and sorted(set(chosen)) == chosen
    assert all(stage_costs(costs, chosen))
    partitions = [
        list(borders)
        for borders in combinations(range(1, len(costs)), num_stages - 1)
        if all(stage_costs(costs, list(borders)))
    ]
    fastest = min(max(stage_costs(costs, borders)) for borders in partitions)
    allowed = max(fastest, sum(costs) / num_stages * (1 + NEAR))
    fast = [b for b in partitions if max(stage_costs(costs, b)) <= allowed]
    assert chosen in fast
    fewest = min(sum(bytes_[p] for p in borders) for borders in fast)
    assert sum(bytes_[p] for p in chosen) == fewest


def test_equal_bytes_leave_the_most_even_partition():
    assert stage_borders([1.0] * 10, [7.0] * 10, 4) in ([2, 5, 8], [3, 5, 8], [2, 5, 7])
    heavy_head = [*[1.0] * 6, 3.0]
    parts = np.split(np.array(heavy_head), stage_borders(heavy_head, [1.0] * 7, 3))
    assert [part.sum() for part in parts] == [3.0, 3.0, 3.0]
