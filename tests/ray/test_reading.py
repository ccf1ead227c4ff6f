"""A host reads what its devices hold, before it is asked, and nothing else."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from autopar.lowering.exported_program import ShardedType
from autopar.runtime.ray_programs import sharding_of
from autopar.runtime.ray_sources import SourceOnHost, Want
from autopar.state.batch_tree import BatchTree
from autopar.state.examples import Examples

SIZE = 8
LIKE = {
    "x": jax.ShapeDtypeStruct((SIZE, 4), "f4"),
    "y": jax.ShapeDtypeStruct((SIZE,), "i4"),
}


class Source:
    """Examples, with a record of what was read; some may have to be waited for."""

    def __init__(self, length: int = 1000, broken: int = -1) -> None:
        self.length, self.broken = length, broken
        self.read: list[int] = []
        self.may_read = threading.Event()
        self.may_read.set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.may_read.wait(60)
        if number == self.broken:
            raise OSError("a file is damaged")
        self.read.append(number)
        return {"x": np.arange(4, dtype="f4") + number, "y": np.int32(number)}


def on_host(source: Any, num_ahead: int = 2, end: int | None = None) -> SourceOnHost:
    return SourceOnHost(Examples(source, BatchTree.of(LIKE), None), num_ahead, end)


def kind(shape: tuple[int, ...], *dims: str, size: int = 4) -> ShardedType:
    axes = tuple((dim,) if dim else () for dim in dims)
    dtype = "float32" if len(shape) == 2 else "int32"
    return ShardedType(shape, dtype, ("a", "b"), (size, 2), axes)


WHOLE = (
    Want(0, kind((SIZE, 4), "a", "b"), 0, 0, 1),
    Want(2, kind((SIZE,), ""), 1, 0, 1),
)


def eventually(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    return is_true()


def batches(*firsts: int) -> list[int]:
    return [first + i for first in firsts for i in range(SIZE)]


def test_inputs_are_the_rows_where_they_lie():
    source = Source()
    found = on_host(source).take(WHOLE, 16)
    assert found.keys() == {0, 2}
    for want in WHOLE:
        assert found[want.position].sharding == sharding_of(want.type)
    np.testing.assert_array_equal(found[2], np.arange(16, 24))
    np.testing.assert_array_equal(found[0], found[2][:, None] + np.arange(4.0))


def test_microbatches_are_rows_in_turn():
    wants = tuple(Want(m, kind((2, 4), "b", ""), 0, m, 4) for m in range(4))
    source = Source()
    found = on_host(source, num_ahead=0).take(wants, 8)
    for m in range(4):
        np.testing.assert_array_equal(found[m][:, 0], [8 + m, 12 + m])
    assert source.read == batches(8), "each once"


def test_only_rows_that_are_held_are_read():
    source = Source()
    found = on_host(source, num_ahead=0).take((Want(0, kind((2,), ""), 1, 1, 4),), 0)
    np.testing.assert_array_equal(found[0], [1, 5])
    assert source.read == [1, 5]


def test_the_next_batches_are_read_before_they_are_asked_for():
    source = Source()
    reader = on_host(source)
    reader.take(WHOLE, 0)
    assert eventually(lambda: source.read == batches(0, 8, 16))
    source.may_read.clear()  # what comes was read
    np.testing.assert_array_equal(reader.take(WHOLE, 8)[2], batches(8))
    source.may_read.set()
    reader.take(WHOLE, 16)
    assert eventually(lambda: source.read == batches(0, 8, 16, 24, 32))


def test_batches_that_are_left_out_are_not_read():
    source = Source()
    reader = on_host(source, num_ahead=1)
    for first in (0, 32, 64):
        np.testing.assert_array_equal(reader.take(WHOLE, first)[2], batches(first))
    assert eventually(lambda: source.read[-SIZE:] == batches(96))
    assert not set(batches(40, 72)) & set(source.read[2 * SIZE :])


def test_a_batch_may_come_again_and_others_before_it():
    reader = on_host(Source())
    for first in (16, 16, 0, 24, 8):
        np.testing.assert_array_equal(reader.take(WHOLE, first)[2], batches(first))


def test_nothing_is_read_behind_the_end():
    source = Source()
    reader = on_host(source, num_ahead=4, end=20)
    reader.take(WHOLE, 0)
    reader.take(WHOLE, 8)
    reader.close()
    assert source.read == batches(0, 8)


def test_an_error_of_the_source_comes_where_its_batch_is_asked_for():
    reader = on_host(Source(broken=13))
    np.testing.assert_array_equal(reader.take(WHOLE, 0)[2], batches(0))
    with pytest.raises(OSError, match="a file is damaged") as caught:
        reader.take(WHOLE, 8)
    assert caught.value.__notes__ == ["raised by the source of data for example 13"]


def test_rows_of_other_types_are_refused():
    class Wrong(Source):
        def __getitem__(self, number: int) -> dict[str, Any]:
            return {**super().__getitem__(number), "y": np.float32(number)}

    with pytest.raises(ValueError, match=r"batch\['y'\] is float32 and not int32; con"):
        on_host(Wrong()).take(WHOLE, 0)


def test_what_a_host_cannot_import_is_told():
    with pytest.raises(ValueError, match=r"import, but .*no_such_module.* on_hosts=F"):
        SourceOnHost.of(b"cno_such_module\nSource\n.", 0, None)
