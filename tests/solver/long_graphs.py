"""Choice graphs shaped like the train step of a transformer, at any depth."""

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, Edge, Node

BATCH, HIDDEN = 16.0, 64.0

# How one axis may split a matrix product [m, k] x [k, n] -> [m, n]: the dim of each
# tensor that it splits (None for none), and the closing collective's cost per byte.
PRODUCT_SPLITS = (
    ((0, None, 0), 0),
    ((None, 1, 1), 0),
    ((1, 0, None), 2),
    ((1, 0, 0), 1),
    ((1, 0, 1), 1),
    ((None, None, None), 0),
)


@dataclass(frozen=True)
class _Kind:
    """An operator: its node, and each operand's spec by choice, the result's last."""

    node: Node
    spec_classes: tuple[np.ndarray, ...]


@dataclass
class _Builder:
    """Operators in program order on a mesh; a tensor's spec gives each axis a dim."""

    axes: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    out_class: list[np.ndarray] = field(default_factory=list)
    readers: dict[int, list[tuple[int, np.ndarray]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specs = list(product((None, 0, 1), repeat=len(self.axes)))
        self.draw = cache(self.draw)
        self.resharding = cache(self.resharding)

    def add(self, splits: tuple, flops: float, size: float, *inputs: int) -> int:
        kind = self.draw(splits, flops, size)
        index = len(self.nodes)
        self.nodes.append(kind.node)
        self.sizes.append(size)
        self.out_class.append(kind.spec_classes[-1])
        for tensor, classes in zip(inputs, kind.spec_classes[:-1], strict=True):
            self.readers.setdefault(tensor, []).append((index, classes))
        return index

    def elementwise(self, size: float, *inputs: int) -> int:
        count = len(inputs) + 1
        splits = tuple(((dim,) * count, 0) for dim in (None, 0, 1))
        return self.add(splits, size, size, *inputs)

    def matmul(self, m: float, k: float, n: float, a: int, b: int) -> int:
        return self.add(PRODUCT_SPLITS, m * k * n, m * n, a, b)

    def draw(self, splits: tuple, flops: float, size: float) -> _Kind:
        choices = list(product(splits, repeat=len(self.axes)))
        costs, held = [], []
        for choice in choices:
            is_split = [any(d is not None for d in dims) for dims, _ in choice]
            ways = prod(n for n, s in zip(self.axes, is_split, strict=True) if s)
            spec = [split[-1] for split, _ in choice]
            local = size / self.ways(spec)
            closing = sum(
                per_byte * local * (n if s[-1] is not None else 1) * (n - 1) / n
                for n, (s, per_byte) in zip(self.axes, choice, strict=True)
            )
            costs.append(flops / ways / 50 + closing)
            held.append(local)
        classes = tuple(
            np.array([self.specs.index(tuple(s[i] for s, _ in c)) for c in choices])
            for i in range(len(splits[0][0]))
        )
        return _Kind(Node("operator", np.array(costs), np.array(held)), classes)

    def ways(self, spec: tuple | list) -> int:
        return prod(n for n, d in zip(self.axes, spec, strict=True) if d is not None)

    def resharding(self, size: float) -> np.ndarray:
        """[specs, specs]: gathers, all-to-alls and free slices, axis by axis."""
        costs = np.zeros((len(self.specs),) * 2)
        for (i, source), (j, target) in product(enumerate(self.specs), repeat=2):
            local = size / self.ways(source)
            for n, a, b in zip(self.axes, source, target, strict=True):
                if a is not None and b is None:
                    local *= n
                    costs[i, j] += local * (n - 1) / n
                elif a != b and a is not None:
                    costs[i, j] += local * (n - 1) / n + 0.1
        return costs


def train_step_graph(num_layers: int, axes: tuple[int, ...] = (4, 4)) -> ChoiceGraph:
    """Forward, backward and update over equal layers, about 67 operators a layer.

    A tensor with one reader is an edge with resharding costs. One with several has a
    relay: a copy in some spec, which they all read.
    """
    build = _Builder(axes)
    value, tapes = build.elementwise(BATCH * HIDDEN), []
    for _ in range(num_layers):
        value, tape = _forward(build, value)
        tapes.append(tape)
    grad = build.elementwise(BATCH * HIDDEN, value)
    for tape in reversed(tapes):
        grad = _backward(build, grad, tape)
    for tensor, readers in sorted(build.readers.items()):
        _connect(build, tensor, readers)
    return ChoiceGraph(tuple(build.nodes), tuple(build.edges))


_Tape = list[tuple[str, float, float, int, int]]


def _forward(build: _Builder, value: int) -> tuple[int, _Tape]:
    tape: _Tape = []
    for widths in ((1, 1, 1), (4, 1)):
        tape.append(("skip", 1, 1, value, -1))
        inner, width = value, 1.0
        for wider in widths:
            size = BATCH * HIDDEN * width
            tape.append(("map", width, width, inner, -1))
            inner = build.elementwise(size, inner)
            weight = build.elementwise(HIDDEN * HIDDEN * width * wider)
            tape.append(("product", width, wider, inner, weight))
            inner = build.matmul(BATCH, HIDDEN * width, HIDDEN * wider, inner, weight)
            width = wider
        value = build.elementwise(BATCH * HIDDEN, value, inner)
    return value, tape


def _backward(build: _Builder, grad: int, tape: _Tape) -> int:
    skip = grad
    for kind, width, wider, source, weight in reversed(tape):
        k, n = HIDDEN * width, HIDDEN * wider
        if kind == "skip":
            grad = skip = build.elementwise(BATCH * HIDDEN, skip, grad)
        elif kind == "map":
            grad = build.elementwise(BATCH * k, grad, source)
        else:
            flipped = build.elementwise(BATCH * k, source)
            partial = build.matmul(k, BATCH, n, flipped, grad)
            moment = build.elementwise(k * n)
            moment = build.elementwise(k * n, partial, moment)
            build.elementwise(k * n, weight, moment)
            grad = build.matmul(BATCH, n, k, grad, build.elementwise(k * n, weight))
    return grad


def _connect(
    build: _Builder, tensor: int, readers: list[tuple[int, np.ndarray]]
) -> None:
    costs, made = build.resharding(build.sizes[tensor]), build.out_class[tensor]
    if len(readers) == 1:
        build.edges.append(Edge(tensor, *readers[0][:1], made, readers[0][1], costs))
        return
    relay, own = len(build.nodes), np.arange(len(build.specs))
    build.edges.append(Edge(tensor, relay, made, own, costs))
    build.edges += [Edge(relay, to, own, classes, costs) for to, classes in readers]
    held = [build.sizes[tensor] / build.ways(spec) for spec in build.specs]
    build.nodes.append(Node("relay", np.zeros(len(held)), np.array(held)))
