"""How much may be live, where what is live takes more than that."""

from autopar.planner.live_limit import LiveLimit


def test_a_plan_that_fits_at_once_settles_it() -> None:
    limit = LiveLimit(1000)
    limit.raise_again()
    assert limit.is_settled and limit.bytes == 1000


def test_it_goes_down_by_what_the_plan_found_needs_more() -> None:
    limit = LiveLimit(1000)
    limit.lower(live_bytes=990, peak_bytes=1100)
    assert limit.bytes == 900
    assert not limit.is_settled


def test_it_goes_up_again_half_way_where_something_fits() -> None:
    limit = LiveLimit(1000)
    limit.lower(live_bytes=990, peak_bytes=1100)
    limit.raise_again()
    assert limit.bytes == 945
    limit.lower(live_bytes=940, peak_bytes=1200)  # alike would be below what fitted
    assert limit.bytes == 920
    assert not limit.is_settled


def test_it_is_settled_once_both_ends_meet() -> None:
    limit = LiveLimit(1000)
    limit.lower(live_bytes=1000, peak_bytes=1003)
    limit.raise_again()
    assert limit.is_settled


def test_it_goes_on_from_a_plan_that_fits() -> None:
    limit = LiveLimit(1000)
    limit.lower(live_bytes=990, peak_bytes=1100)
    limit.raise_again()
    limit.start_at(930)
    assert limit.bytes == 930 and not limit.is_settled
    limit.raise_again()
    assert limit.bytes == 960
