"""A sum over two groups, one after another, may be compiled as one over both."""

from dataclasses import replace

import pytest

from autopar.sharding.collective import Collective
from tests.test_audit import DATA, GRID, MODEL, all_reduce, audit_compiled

BOTH = GRID.groups(["data", "model"])
# As many devices as those of DATA, but all within those of MODEL.
PAIRS = tuple((device, device + 1) for device in range(0, 8, 2))
SUMMED_TWICE = (
    all_reduce(1024, groups=BOTH),
    *(all_reduce(n, count=3, groups=g) for g in (DATA, MODEL) for n in (64, 256)),
)


@pytest.mark.parametrize(
    ("compiled", "num_bytes"),
    [
        ((SUMMED_TWICE[0], *(all_reduce(n, 3, groups=BOTH) for n in (64, 256))), 960),
        ((all_reduce(1984, groups=BOTH),), 960),
        # Of what is gone from the two groups the rest is constant.
        ((all_reduce(1024 + 192, groups=BOTH),), 192),
    ],
)
def test_a_sum_over_two_groups_one_after_another_may_be_one_over_both(
    compiled: tuple[Collective, ...], num_bytes: int
) -> None:
    found = audit_compiled(SUMMED_TWICE, compiled)
    found.raise_if_wrong()
    assert len(found.differences) == 3
    for each in found.differences:
        assert each.reason.startswith(
            f"fold: {num_bytes} B over model and data sent as one"
        )


ONCE = all_reduce(groups=BOTH)
PARTS = all_reduce(groups=DATA), all_reduce(groups=MODEL)


@pytest.mark.parametrize(
    ("planned", "compiled"),
    [
        # One of both is still there, or was never planned.
        (PARTS, (ONCE, PARTS[0])),
        (PARTS[:1], (ONCE,)),
        # Other groups, another type, reduction or size; more often; nobody knows.
        (PARTS, (replace(ONCE, groups=PAIRS),)),
        (PARTS, (replace(ONCE, dtype="int32"),)),
        (PARTS, (replace(ONCE, reduction="max"),)),
        (PARTS, (replace(ONCE, bytes=260),)),
        (PARTS, (replace(ONCE, bytes=128),)),
        (PARTS, (replace(ONCE, count=2),)),
        (PARTS, (replace(ONCE, unbounded=True),)),
        # Groups of which one is within the other's; parts that differ in size, type,
        # reduction or executions.
        ((replace(PARTS[0], groups=PAIRS), PARTS[1]), (ONCE,)),
        ((PARTS[0], replace(PARTS[1], bytes=512)), (ONCE,)),
        ((PARTS[0], replace(PARTS[1], dtype="int32")), (ONCE,)),
        ((PARTS[0], replace(PARTS[1], reduction="max")), (ONCE,)),
        ((PARTS[0], replace(PARTS[1], count=3)), (replace(ONCE, count=3),)),
        # A scatter is no sum that all devices have.
        (tuple(replace(each, kind="reduce_scatter") for each in PARTS), (ONCE,)),
    ],
)
def test_a_sum_over_both_groups_that_no_fold_explains_fails(
    planned: tuple[Collective, ...], compiled: tuple[Collective, ...]
) -> None:
    assert not audit_compiled(planned, compiled).ok
