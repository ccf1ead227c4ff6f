"""Which sources hosts read, and that they get what this process has."""

import pickle
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from autopar.data.batches import host_source
from autopar.state.batch_tree import BatchTree
from autopar.state.examples import Examples, HostSource

pytest.importorskip("ray")
LIKE = {"x": jax.ShapeDtypeStruct((4, 3), "f4"), "y": jax.ShapeDtypeStruct((4,), "i4")}
NUMBER = 1000


def arrays() -> dict[str, np.ndarray]:
    x = np.arange(3 * NUMBER, dtype=np.float32).reshape(NUMBER, 3)
    return {"x": x, "y": np.arange(NUMBER, dtype=np.int32)}


class Windows:
    """Examples of a file of numbers, which begin one behind the other."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array) - 3

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return {"x": self.array[number : number + 3], "y": np.int32(number)}


def mapped(folder: Path, array: np.ndarray, order: Any = "C") -> np.memmap:
    path = folder / f"{array.ndim}{order}"
    found = np.memmap(path, array.dtype, "w+", 8, array.shape, order)
    found[...] = array
    found.flush()
    return np.memmap(path, array.dtype, "r+", 8, array.shape, order)


def sent(source: Any, is_asked: bool = False) -> HostSource | None:
    examples = Examples(source, BatchTree.of(LIKE), seed=3)
    return host_source(examples, num_ahead=2, end=None, is_asked=is_asked)


def check_same(found: HostSource) -> None:
    """That hosts read what this process would."""
    there, rows = pickle.loads(found.packed), np.array([0, 2, 3])
    for first in (0, 4, NUMBER - 6):
        ours = found.examples.rows(first, {0: rows, 1: rows[1:]})
        theirs = there.rows(first, {0: rows, 1: rows[1:]})
        for leaf in (0, 1):
            np.testing.assert_array_equal(theirs[leaf], ours[leaf])


@pytest.mark.parametrize("order", ["C", "F"])
def test_mapped_arrays_are_sent_as_paths(tmp_path: Path, order: str):
    found = sent({name: mapped(tmp_path, a, order) for name, a in arrays().items()})
    assert found is not None and len(found.packed) < 3000
    check_same(found)


@pytest.mark.parametrize(
    "part",
    [
        lambda a: a,
        lambda a: a[5:],
        lambda a: np.asarray(a)[2:-2],
        lambda a: a[::-2],
        lambda a: a.view(np.int32).view(np.float32)[1:],
    ],
    ids=["whole", "part", "plain", "backwards", "viewed"],
)
def test_parts_of_mapped_arrays_are_too(tmp_path: Path, part: Any):
    numbers = np.arange(4 * NUMBER, dtype=np.float32)
    found = sent(Windows(part(mapped(tmp_path, numbers))))
    assert found is not None and len(found.packed) < 3000
    check_same(found)


def test_what_is_in_memory_is_sent_if_asked(tmp_path: Path):
    one = {**arrays(), "x": mapped(tmp_path, arrays()["x"])}
    examples = [{"x": x, "y": y} for x, y in zip(*arrays().values(), strict=True)]
    for source in (arrays(), one, examples):
        assert sent(source) is None
        found = sent(source, is_asked=True)
        assert found is not None
        check_same(found)


def test_what_cannot_be_sent_is_read_here(caplog: pytest.LogCaptureFixture):
    source: Any = Windows(np.zeros(NUMBER, np.float32))
    source.lock = threading.Lock()
    assert sent(source) is None
    told = r"pickling the Windows failed: TypeError: .*lock.*; open files .* on_hosts=F"
    assert "this process reads the examples for all hosts" in caplog.text
    with pytest.raises(TypeError, match=told):
        sent(source, is_asked=True)


def test_trees_of_the_script_are_read_here(monkeypatch: pytest.MonkeyPatch):
    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, x: Any, y: Any) -> None:
            self.x, self.y = x, y

        def tree_flatten(self) -> Any:
            return (self.x, self.y), None

        @classmethod
        def tree_unflatten(cls, _: None, leaves: Any) -> Any:
            return cls(*leaves)

    monkeypatch.setattr(Pair, "__module__", "__main__")
    tree = BatchTree.of({"pair": Pair(*LIKE.values())})
    examples = Examples(Windows(np.zeros(NUMBER, np.float32)), tree, None)
    with pytest.raises(TypeError, match="Pair is one of the script itself; move it"):
        host_source(examples, 2, None, is_asked=True)


def test_batches_for_hosts_are_read_where_they_are_used():
    """Also by a step of this process."""
    batches = autopar.Batches(arrays(), LIKE, seed=1, on_hosts=True)
    here = autopar.Batches(arrays(), LIKE, seed=1)
    step = autopar.parallelize(lambda batch: batch["x"].sum() + batch["y"].sum())
    for _ in range(2):
        assert batches.position == here.position
        batch, expected = next(batches), next(here)
        assert batch["x"].shape == (4, 3) and batch["y"].dtype == np.int32
        np.testing.assert_array_equal(autopar.fetch(batch)["x"], expected["x"])
        np.testing.assert_allclose(step(batch), jax.jit(step)(expected))


def test_iterators_are_not_for_hosts():
    with pytest.raises(ValueError, match=r"so is on_hosts=, but generator has no len"):
        autopar.Batches((each for each in [arrays()]), LIKE, on_hosts=True)
