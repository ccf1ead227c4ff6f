"""Kernels that each read all that others did, and more, as if all reads were listed."""

import random
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.costs import depth_first, kernels, sources
from autopar.costs.execution_order import Liveness, run_in_order
from autopar.costs.fusion import InMemory, Nodes
from autopar.costs.instructions import Instructions
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
    assert short.columns.includes
    _limited(monkeypatch, _ALL_LISTED)
    listed = _random_block(seed)
    expected = run_in_order(listed)
    assert not listed.columns.includes
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
        assert one.reads == more.reads[1:]
    assert len(found.columns.includes) == count - kernels.MANY_READS
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

    def apart(instructions: Instructions) -> depth_first._Lines:
        own = np.arange(len(instructions.bytes))
        return lines(own, own, np.arange(len(own) + 1))

    joined = lines.of(Instructions.of(block, found.duplicated))
    monkeypatch.setattr(lines, "of", staticmethod(apart))
    assert len(joined.starts) <= len(joined.order)  # one is the end of the last
    assert _as_lists(run_in_order(block)) == _as_lists(found)


@pytest.mark.parametrize("seed", range(40))
def test_short_lists_are_the_same_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = random.Random(seed)
    nodes, written = _random_nodes(random_)
    chosen, place = np.arange(len(nodes)), _random_order(nodes, random_)
    monkeypatch.setattr(sources, "_MANY", 1)
    starts, reads = sources.sources(nodes, written, chosen, place)
    monkeypatch.setattr(sources, "_MANY", _ALL_LISTED)
    others = sources.sources(nodes, written, chosen, place)
    assert (starts == others[0]).all() and (reads == others[1]).all()
    for node in range(len(nodes)):
        own = reads[starts[node] : starts[node + 1]].tolist()
        assert own == _absorbed(nodes, written.is_written, node, place)


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


def _random_order(nodes: Nodes, random_: random.Random) -> np.ndarray:
    """[nodes] places, each after those of what it reads."""
    place = np.full(len(nodes), -1)
    reads = [set(nodes.reads[a:b] - 1) - {-1} for a, b in pairwise(nodes.read_start)]
    for number in range(len(nodes)):
        ready = [
            node
            for node, made in enumerate(reads)
            if place[node] < 0 and all(place[each] >= 0 for each in made)
        ]
        place[random_.choice(ready)] = number
    return place


def _absorbed(
    nodes: Nodes, in_memory: np.ndarray, node: int, place: np.ndarray
) -> list[int]:
    """What a node reads once the last of what it could do itself was taken into it,
    and then the last of the others, until all of it is in memory."""
    found, todo = list[int](), {node}
    while todo:
        last = max(todo, key=lambda each: place[each])
        todo.remove(last)
        for value in nodes.reads[slice(*nodes.read_start[last : last + 2])].tolist():
            if in_memory[value]:
                found.append(value)
            else:
                todo.add(value - 1)
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
        own = [each for each in dict.fromkeys(more) if each not in first]
        place = random_.randrange(len(own) + 1)
        all_reads.append((*own[:place], *first, *own[place:]) or (0,))
    last = num_inputs + num_kernels - 3
    all_reads[-2:] = (0, 1, last), (last - 1, 0, 1, last)
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
