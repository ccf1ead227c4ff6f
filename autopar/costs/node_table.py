"""Collects the nodes of a block before fusion, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from .fusion import Nodes

_Pairs = tuple[np.ndarray, np.ndarray]  # (node of a group, value)
_NO_PAIRS: _Pairs = (np.zeros(0, np.intp), np.zeros(0, np.intp))


class NodeTable:
    """Groups of nodes, put in the order of their times at the end."""

    def __init__(self) -> None:
        self._times: list[np.ndarray] = []
        self._columns: list[list[np.ndarray]] = [[] for _ in range(12)]
        self._reads: list[_Pairs] = []
        self._writes: list[_Pairs] = []
        self._count = 0

    def add(
        self,
        times: np.ndarray,
        *,
        operator: np.ndarray | int = -1,
        cheap: np.ndarray | bool = False,
        expensive: np.ndarray | bool = False,
        opens: np.ndarray | bool = False,
        streams: np.ndarray | bool = False,
        streamed: np.ndarray | bool = False,
        absorbs: np.ndarray | bool = False,
        repeated: np.ndarray | bool = False,
        torn: np.ndarray | bool = False,
        moves: np.ndarray | bool = False,
        inner: np.ndarray | int = 0,
        send: bool = False,
        reads: _Pairs = _NO_PAIRS,
        writes: _Pairs = _NO_PAIRS,
    ) -> None:
        """Nodes of a group; see `Nodes`. A single value is for all of them."""
        given = (operator, cheap, expensive, opens, streams, streamed, absorbs)
        given = (*given, repeated, torn, moves, inner, send)
        for column, each in zip(self._columns, given, strict=True):
            column.append(np.broadcast_to(np.asarray(each), times.shape))
        self._times.append(times)
        self._reads.append((reads[0] + self._count, reads[1]))
        self._writes.append((writes[0] + self._count, writes[1]))
        self._count += len(times)

    def add_nodes(self, nodes: Nodes) -> None:
        """Nodes at the times 0, 1, 2, ..."""
        columns = [getattr(nodes, field.name) for field in fields(Nodes)]
        for column, each in zip(self._columns, columns[:12], strict=True):
            column.append(each)
        own = np.arange(len(nodes))
        self._times.append(own.astype(float))
        for pairs, start, value in (
            (self._reads, nodes.read_start, nodes.reads),
            (self._writes, nodes.write_start, nodes.writes),
        ):
            pairs.append((np.repeat(own, np.diff(start)) + self._count, value))
        self._count += len(nodes)

    def build(self) -> Nodes:
        """All of them."""
        order = np.argsort(np.concatenate(self._times), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))

        def by_node(groups: Sequence[_Pairs]) -> _Pairs:
            node = place[np.concatenate([pair[0] for pair in groups])]
            value = np.concatenate([pair[1] for pair in groups])
            counts = np.bincount(node, minlength=len(order))
            start = np.concatenate([[0], np.cumsum(counts)])
            return start, value[np.argsort(node, kind="stable")]

        columns = [np.concatenate(column)[order] for column in self._columns]
        ends = (*by_node(self._reads), *by_node(self._writes))
        names = (field.name for field in fields(Nodes))
        return Nodes(**dict(zip(names, (*columns, *ends), strict=True)))
