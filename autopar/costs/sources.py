"""What kernels read from memory, through all that they do themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .fusion import InMemory, Nodes
from .names import roots


def sources(
    nodes: Nodes, written: InMemory, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What nodes read from memory, through all that they do themselves.

    Args:
      nodes: all of them.
      written: which values are in memory.
      chosen: the nodes that are asked for.

    Returns:
      starts, reads: chosen node k reads `reads[starts[k] : starts[k + 1]]`.
    """
    if not len(nodes):
        return np.zeros(1, np.intp), np.zeros(0, np.intp)
    nodes, maker, in_memory = _with_repeated(nodes, written)
    read = _through_single_reads(nodes, maker, in_memory)[nodes.reads]
    counts = np.diff(nodes.read_start)
    reader = np.repeat(np.arange(len(nodes)), counts)
    pairs = np.sort(reader * len(in_memory) + read)
    reads_twice = pairs[1:][np.diff(pairs) == 0] // len(in_memory)
    is_mixed = np.bincount(reader[~in_memory[read]], minlength=len(nodes)) > 0
    is_mixed[reads_twice] = True
    is_asked = np.zeros(len(nodes), bool)
    is_asked[chosen] = True
    is_mixed &= is_asked | (counts > 1)  # the others are read through
    mixed = _mixed_sources(nodes, read, maker, in_memory, is_mixed)
    counts[list(mixed)] = [len(each) for each in mixed.values()]
    starts = np.concatenate([[0], np.cumsum(counts[chosen])])
    taken = np.repeat(is_mixed[chosen], counts[chosen])
    found = np.empty(starts[-1], np.intp)
    found[~taken] = read[(is_asked & ~is_mixed)[reader]]
    among = chosen[is_mixed[chosen]].tolist()
    found[taken] = np.array([v for node in among for v in mixed[node]], np.intp)
    return starts, found


def _with_repeated(
    nodes: Nodes, written: InMemory
) -> tuple[Nodes, np.ndarray, np.ndarray]:
    """Nodes, makers of values and which are in memory, with others for what is again.

    Of value v that is value [values] + v, which is in nobody's memory.
    """
    count = len(written.is_written)
    maker = nodes.makers(count)
    again = written.is_inside(nodes, maker) & written.is_written[nodes.reads]
    if not again.any():
        return nodes, maker, written.is_written
    reads = np.where(again, nodes.reads + count, nodes.reads)
    in_memory = np.concatenate([written.is_written, maker < 0])
    return replace(nodes, reads=reads), np.concatenate([maker, maker]), in_memory


def _through_single_reads(
    nodes: Nodes, maker: np.ndarray, in_memory: np.ndarray
) -> np.ndarray:
    """[values] themselves, or what they are made of if that is one value."""
    passes = np.flatnonzero(~in_memory & (np.diff(nodes.read_start)[maker] == 1))
    name = np.arange(len(in_memory))
    name[passes] = nodes.reads[nodes.read_start[maker[passes]]]
    return roots(name)


def _mixed_sources(
    nodes: Nodes,
    read: np.ndarray,
    maker: np.ndarray,
    in_memory: np.ndarray,
    is_mixed: np.ndarray,
) -> dict[int, tuple[int, ...]]:
    """By node that `is_mixed`, what it reads from memory, each once."""
    starts, reads = nodes.read_start.tolist(), read.tolist()
    is_there, made_by = in_memory.tolist(), maker.tolist()
    found: dict[int, tuple[int, ...]] = {}
    for node in np.flatnonzero(is_mixed).tolist():
        each = list[int]()
        for value in reads[starts[node] : starts[node + 1]]:
            if is_there[value]:
                each.append(value)
                continue
            made = made_by[value]
            inside = found.get(made)
            each += reads[starts[made] : starts[made + 1]] if inside is None else inside
        found[node] = tuple(dict.fromkeys(each)) if len(each) > 1 else tuple(each)
    return found
