"""Kernels that each read all that others did, and more, as if all reads were listed."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.costs import depth_first, kernels, sources
from autopar.costs.execution_order import Liveness, run_in_order
from autopar.costs.fusion import InMemory, Nodes
from autopar.costs.kernels import Kernel, KernelBlock, Value
from autopar.costs.node_table import NodeTable

from .test_memory_model import profile_of

_ALL_LISTED = 10**9


def _limited(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Lists with more than `most` reads are kept as what they add to others."""
    for module in (kernels, depth_first):
        monkeypatch.setattr(module, "MANY_READS", most)


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_that_of_listed_reads(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limited(monkeypatch, 2)
    short = _random_block(seed)
    found = run_in_order(short)
    assert short.columns.begins_as
    _limited(monkeypatch, _ALL_LISTED)
    listed = _random_block(seed)
    expected = run_in_order(listed)
    assert not listed.columns.begins_as
    assert _as_lists(found) == _as_lists(expected)


@pytest.mark.parametrize("seed", range(20))
def test_inputs_are_copied_unless_all_who_read_them_come_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limited(monkeypatch, 2)
    block = _random_block(seed)
    before: list[set[int]] = []
    for k, kernel in enumerate(block.kernels):
        made = {int(block.maker[value]) for value in kernel.reads} - {-1}
        before.append({k}.union(*(before[each] for each in made)))
    copied = {
        old
        for old, new in block.replaced
        for k, kernel in enumerate(block.kernels)
        if old in kernel.reads and k not in before[block.maker[new]]
    }
    assert run_in_order(block).duplicated == copied


def test_sums_done_again_read_what_those_before_do_and_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No sum of this chain is in memory: each is made anew for what doubles it."""
    count = 24
    x, w = jnp.ones((64, 64)), jnp.ones((count, 64, 64))

    def step(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        found: list[jax.Array] = []
        for each in ws:
            x = x + each @ each
            found.append(x * 2.0)
        return found

    found = profile_of(step, x, *w)[0].liveness[0].block
    doubled = [kernel for kernel in found.kernels if kernel.is_elementwise]
    assert [len(kernel.reads) for kernel in doubled] == list(range(2, count + 2))
    for one, more in zip(doubled, doubled[1:], strict=False):
        assert one.reads == more.reads[:-1]
    assert len(found.columns.begins_as) == count - kernels.MANY_READS
    monkeypatch.setattr(sources, "_FEW", _ALL_LISTED)
    listed = profile_of(step, x, *w)[0].liveness[0].block
    assert tuple(listed.kernels) == tuple(found.kernels)


@pytest.mark.parametrize("seed", range(40))
def test_lines_are_ordered_as_each_of_their_instructions(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limited(monkeypatch, 2)
    block = _random_block(seed, in_lines=0.7)
    found = run_in_order(block)
    lines = depth_first._Lines

    def apart(instructions: depth_first.Instructions) -> depth_first._Lines:
        own = np.arange(len(instructions.bytes))
        return lines(own, own, np.arange(len(own) + 1))

    joined = lines.of(depth_first.Instructions.of(block, found.duplicated))
    monkeypatch.setattr(lines, "of", staticmethod(apart))
    assert len(joined.starts) <= len(joined.order)  # one is the end of the last
    assert _as_lists(run_in_order(block)) == _as_lists(found)


@pytest.mark.parametrize("seed", range(40))
def test_short_lists_are_the_same_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, written = _random_nodes(random.Random(seed))
    chosen = np.arange(len(nodes))
    monkeypatch.setattr(sources, "_MANY", 1)
    starts, reads = sources.sources(nodes, written, chosen)
    monkeypatch.setattr(sources, "_MANY", _ALL_LISTED)
    others = sources.sources(nodes, written, chosen)
    assert (starts == others[0]).all() and (reads == others[1]).all()
    for node in range(len(nodes)):
        own = reads[starts[node] : starts[node + 1]].tolist()
        assert own == _read_through(nodes, written.is_written, node)


def _random_nodes(random_: random.Random) -> tuple[Nodes, InMemory]:
    """Nodes that make one value each, of which some are in memory, after an input."""
    count = random_.randrange(5, 60)
    table, own = NodeTable(), np.arange(count)
    reads = [
        random_.choices(range(max(0, k - 6), k + 1), k=random_.choice((1, 2, 2, 3)))
        for k in range(count)
    ]
    reader = np.repeat(own, list(map(len, reads)))
    read = np.array([value for each in reads for value in each], np.intp)
    table.add(
        own, cheap=True, absorbs=True, reads=(reader, read), writes=(own, own + 1)
    )
    is_written = np.array([True] + [random_.random() < 0.3 for _ in range(count)])
    nothing = np.zeros(count + 1, bool)
    return table.build(), InMemory(is_written, nothing, nothing, nothing[1:])


def _read_through(nodes: Nodes, in_memory: np.ndarray, node: int) -> list[int]:
    """What a node reads from memory, in order and each once unless it reads nothing
    through others."""
    own = nodes.reads[nodes.read_start[node] : nodes.read_start[node + 1]].tolist()
    found: list[int] = []
    for value in own:
        inside = (
            [value] if in_memory[value] else _read_through(nodes, in_memory, value - 1)
        )
        found += inside
    return list(dict.fromkeys(found))


def _as_lists(found: Liveness) -> tuple[object, ...]:
    arrays = found.starts.tolist(), found.ends.tolist(), found.bytes.tolist()
    return found.order, found.duplicated, dict(found.borrowed), *arrays


def _random_block(seed: int, in_lines: float = 0.0) -> KernelBlock:
    """Inputs, some of them replaced, and kernels; many read what another one does."""
    random_ = random.Random(seed)
    num_inputs, num_kernels = random_.randrange(2, 8), random_.randrange(12, 60)
    count = num_inputs + num_kernels
    values = [
        Value(v, (), random_.choice((8, 8, 64, 1000)), False, v < num_inputs)
        for v in range(count)
    ]
    all_reads: list[tuple[int, ...]] = []
    for k in range(num_kernels):
        there = range(num_inputs + k)
        first: tuple[int, ...] = ()
        if k and random_.random() < 0.6:
            first = random_.choice(all_reads[-4:])
        more = random_.sample(there, min(len(there), random_.randrange(1, 4)))
        if in_lines and k and random_.random() < in_lines:
            first, more = (), [num_inputs + k - 1]
        all_reads.append(tuple(dict.fromkeys((*first, *more))) or (0,))
    last = num_inputs + num_kernels - 3
    all_reads[-2:] = (last, 0, 1), (last, 0, 1, last - 1)
    made = [
        Kernel(k, reads, (num_inputs + k,), is_elementwise=random_.random() < 0.5)
        for k, reads in enumerate(all_reads)
    ]
    replacements = random_.sample(range(num_inputs, count), num_inputs - 1)
    replaced = [(old, new) for old, new in enumerate(replacements)]
    values = [
        each._replace(bytes=values[dict(replaced).get(v, v)].bytes)
        for v, each in enumerate(values)
    ]
    kept = random_.sample(range(num_inputs, count), random_.randrange(1, 4))
    kept = tuple(dict.fromkeys((*replacements, *kept)))
    assert np.all(np.diff([kernel.writes[0] for kernel in made]) == 1)
    return KernelBlock(values, made, kept, tuple(replaced))
