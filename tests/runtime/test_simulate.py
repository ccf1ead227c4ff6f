"""Simulated lists: deadlocks are shown, memory and timelines are counted."""

import pytest

from autopar.runtime.emit import emit
from autopar.runtime.instructions import InstructionList
from autopar.runtime.schedule import Schedule, Task, gpipe, one_f_one_b
from autopar.runtime.simulate import simulate
from benchmarks.stage_chain import chain, simulate_schedule


def _parse(text: str) -> tuple[Task, ...]:
    return tuple(Task.parse(word) for word in text.split())


def test_a_deadlock_is_marked_in_the_grid() -> None:
    rows = (_parse("0F0 0B0 0F1 0B1 0A"), _parse("1F0 1F1 1B0 1B1 1A"))
    lists = emit(chain(2, 2), Schedule("by hand", 2, 2, rows))
    with pytest.raises(ValueError, match="wait for each other") as caught:
        simulate(lists)
    assert "submesh 0: 0F0 >0B0< 0F1  0B1  0A" in str(caught.value)
    assert "submesh 1: 1F0 >1F1< 1B0  1B1  1A" in str(caught.value)
    assert 'submesh 0 at: receive "cotangent 1"@0 from 1 to 0' in str(caught.value)


def test_lists_that_do_not_belong_together_are_refused() -> None:
    first, _ = emit(chain(2, 2), gpipe(2, 2))
    _, second = emit(chain(2, 2), gpipe(2, 2))
    swapped = list(second.instructions)
    receives = [i for i, x in enumerate(swapped) if str(x).startswith("receive")]
    a, b = receives
    swapped[a], swapped[b] = swapped[b], swapped[a]
    with pytest.raises(AssertionError, match="for receive"):
        simulate((first, InstructionList(1, tuple(swapped))))


def test_bytes_count_what_is_held_and_sent() -> None:
    """State and gradient of 100 bytes, all else of 1: the peak is what is in flight."""

    def slot_bytes(slot: str, _: int) -> int:
        return 100 if slot.startswith(("state", "gradient")) else 1

    for schedule, in_flight in ((gpipe(4, 8), 8), (one_f_one_b(4, 8), 3)):
        lists = emit(chain(4, 8), schedule)
        found = simulate(lists, slot_bytes=slot_bytes)
        # On stage 1: residuals, the cotangent received and the one just made.
        assert found.peak_bytes[1] == 100 + 100 + in_flight + 2


def test_transfers_take_time_and_share_their_link() -> None:
    costs = {"forward": 1.0, "backward": 2.0, "apply": 0.0}
    schedule = gpipe(2, 1)
    found = simulate_schedule(schedule, lambda t: costs[t.kind], lambda _: 0.5)
    assert found.timeline.makespan_seconds == 6 + 2 * 0.5
    slow = simulate_schedule(gpipe(2, 4), lambda t: costs[t.kind], lambda _: 3.0)
    starts = [e.start for e in slow.timeline.events if e.task.stage == 1][:4]
    assert starts == [4.0, 7.0, 10.0, 13.0]


def test_a_timeline_prints_as_bars() -> None:
    costs = {"forward": 1.0, "backward": 2.0, "apply": 0.0}
    found = simulate_schedule(gpipe(2, 1), lambda task: costs[task.kind])
    head, first, second = str(found.timeline).splitlines()
    assert head == "6 s, 50.0% of it idle"
    assert first == f"submesh 0: {'F' * 12}{'.' * 36}{'B' * 24}"
    assert second == f"submesh 1: {'.' * 12}{'F' * 12}{'B' * 24}{'.' * 24}"
