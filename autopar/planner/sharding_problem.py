"""The intra-operator problem as a choice graph: vertices that write and read tensors.

Five kinds of vertex, each with one choice per strategy or spec:

  operator  its strategies: every operand and result has a spec under each
  home      where an argument lies; for state, its next value must come back to it
  port      a tensor that enters or leaves a loop, branch or barrier, in one spec
  result    what is returned and no state: as the program leaves it, none pending
  relay     a shared copy of a tensor that several read: resharded once, read by all

An edge between the writer of a tensor (or its relay) and each reader costs the
resharding from the one's spec to the other's, times the trip count of its block.
Operators in a scan body are vertices of the same problem, their costs times the trips.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, EdgeType, TypedEdges

from ..clusters.cluster import Cluster
from ..costs.collectives import at_size
from ..costs.host_memory import host_seconds_per_byte
from ..costs.resharding import Resharder
from ..costs.scan_outputs import stack_seconds_per_byte
from ..graph.build_graph import RELAYOUT_LIKE, STRUCTURED
from ..graph.garbage import without_garbage_collection
from ..graph.op_graph import GraphInput, Operator, OpGraph, TensorType
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.ports import Read, Write, ports_of
from ..sharding.spec import Spec, is_pending, replicated
from .axis_orders import Orders, in_orders, orders_of_step, strategies_in_orders
from .equal_rows import equal_rows
from .overlap import visible_fractions
from .spec_choices import SpecChoices, SpecTable
from .strategies import (
    enumerate_strategies,
    operators_to_split,
    strategy_seconds,
    tensor_specs,
)
from .vertices import (
    NO_SITE,
    OPERAND,
    SITES,
    Access,
    Accesses,
    Pattern,
    VertexColumns,
    VertexKind,
)

WRITES, READS = 0, 1


@dataclass(frozen=True, eq=False)
class ShardingProblem:
    """Vertices, and the same as a `ChoiceGraph` (node i is vertex i).

    `columns` are the vertices as they were built: `vertices` may cost otherwise.
    `visible` [tensors] is the part of the seconds of moving each that a step waits for.
    `write_of` is, by tensor, the place among the writes of what makes it; `edge_writes`
    and `edge_reads` [edges] are the places of what each edge joins.
    """

    graph: OpGraph
    mesh: MeshShape
    vertices: VertexColumns
    choice_graph: ChoiceGraph
    relays: Mapping[int, int]  # vertex by tensor
    write_of: Mapping[int, int]
    columns: VertexColumns
    visible: np.ndarray
    edge_writes: np.ndarray
    edge_reads: np.ndarray

    def writer(self, tensor: int) -> tuple[int, Access]:
        """What makes a tensor, and how; relays do not count."""
        at, writes = self.write_of[tensor], self.columns.writes
        choices = self.columns.choices[writes.choices[at]]
        return int(writes.vertex[at]), Access(tensor, choices)

    def with_seconds(
        self, seconds: Sequence[np.ndarray], kind: np.ndarray
    ) -> ShardingProblem:
        """The same with other seconds of choices, infinite where one is forbidden.

        Those of vertex v are `seconds[kind[v]]`.
        """
        vertices = self.vertices.with_seconds(seconds, kind)
        graph = replace(self.choice_graph, nodes=vertices.nodes)
        return replace(self, vertices=vertices, choice_graph=graph)


@without_garbage_collection()
def build_problem(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    resharder: Resharder,
    pins: Mapping[int, Pin] | None = None,
    *,
    demanded: Iterable[Spec] = (),
) -> ShardingProblem:
    """All vertices and edges of planning `graph` on `mesh`.

    `pins` are those of arguments, by tensor: their homes have only the specs allowed.
    Specs `demanded` by restrictions name orders of axes to choose from, as pins do.
    """
    pins = pins or {}
    orders = orders_of_step(graph, mesh, pins.values(), demanded)
    builder = _Builder(graph, mesh, cluster, resharder, orders)
    for each in graph.inputs:
        builder.add_home(each, pins.get(each.tensor))
    for row, op in enumerate(graph.operators()):
        if op.kind in STRUCTURED:
            builder.add_ports(op)
        else:
            builder.add_operator(row, op)
    builder.add_results()
    return builder.connected()


class _Builder:
    """Vertices in their order; equal ones share a pattern, and patterns their arrays.

    A write is (vertex, tensor, choices), a read has a site, too; see `Accesses`.
    """

    def __init__(
        self,
        graph: OpGraph,
        mesh: MeshShape,
        cluster: Cluster,
        resharder: Resharder,
        orders: Orders,
    ) -> None:
        self.graph, self.mesh, self.cluster = graph, mesh, cluster
        self.resharder, self.orders = resharder, orders
        self.must_split = operators_to_split(graph)
        self.alike = graph.columns.alike.tolist()
        self.num_bytes = [kind.bytes for kind in graph.columns.types]
        self.type_of = graph.columns.type_of.tolist()
        self.specs = SpecTable(mesh.axis_sizes)
        self.legal: dict[object, SpecChoices] = {}
        self.patterns: list[Pattern] = []
        self.accesses: list[tuple[list[int], list[int]]] = []  # choices by pattern
        self.known: dict[object, int] = {}  # patterns
        self.shared: dict[bytes, np.ndarray] = {}
        self.enumerated: dict[tuple[int, bool], Pattern] = {}
        self.choices: list[SpecChoices] = []
        self.numbers: dict[int, int] = {}  # of choices
        self.pattern: list[int] = []
        self.row: list[int] = []
        self.names: dict[int, str] = {}
        self.writes: list[tuple[int, ...]] = []
        self.reads: list[tuple[int, ...]] = []
        self.by_size: dict[object, np.ndarray] = {}

    # Vertices.

    def add_home(self, given: GraphInput, pin: Pin | None) -> None:
        """Where an argument lies; for state, its next value must come back to it."""
        kind, is_sum = self.graph.tensors[given.tensor].type, given.role == "sum"
        choices = self.legal_specs(kind, pending=is_sum, pin=pin)
        seconds = choices.fractions * (
            kind.bytes * host_seconds_per_byte(given, self.cluster)
        )
        reads: list[Read] = []
        if given.output is not None:
            after = self.graph.outputs[given.output]
            if isinstance(after, int):
                reads.append((after, 0, ("output", 0, given.output)))
                if is_sum and given.num_runs:
                    seconds = seconds + self.owed(choices, kind) / given.num_runs
        self.add_tensor("home", choices, [(given.tensor, 0)], reads, seconds)

    def add_ports(self, op: Operator) -> None:
        """The ports of a loop, branch or barrier."""
        for port in ports_of(self.graph, op):
            choices = self.legal_specs(
                port.type,
                pending=port.may_be_pending(self.mesh),
                whole=port.is_whole,
                pin=port.pin(self.mesh),
            )
            times = self.graph.blocks[op.bodies[0]].weight if port.is_stacked else 0.0
            each = port.type.bytes * stack_seconds_per_byte(self.cluster)
            seconds = choices.fractions * (times * each)
            self.add_tensor(
                "port", choices, port.writes, port.reads, seconds, port.name
            )

    def add_results(self) -> None:
        """Outputs that are not state."""
        tied = {each.output for each in self.graph.inputs}
        for position, operand in enumerate(self.graph.outputs):
            if isinstance(operand, int) and position not in tied:
                kind = self.graph.tensors[operand].type
                choices = self.legal_specs(kind, pending=False)
                read: Read = (operand, 0, ("output", 0, position))
                self.add_tensor("result", choices, [], [read])

    def add_operator(self, row: int, op: Operator) -> None:
        """An operator with its strategies; `accesses_of` says what it joins."""
        key = self.alike[row], op.index in self.must_split, op.block
        number = self.known.get(key)
        if number is None:
            number = self.known[key] = self.operator_pattern(op, key[:2])
        self.pattern.append(number)
        self.row.append(row)

    def operator_pattern(self, op: Operator, kind: tuple[int, bool]) -> int:
        if kind not in self.enumerated:
            self.enumerated[kind] = self.strategies_of(op, kind[1])
        once = self.enumerated[kind]
        seconds = self.sharing(once.seconds * self.graph.blocks[op.block].weight)
        return self.add_pattern(replace(once, seconds=seconds))

    def strategies_of(self, op: Operator, must_split: bool) -> Pattern:
        """The strategies of one kind of operator, with what an execution takes."""
        mesh, cluster = self.mesh, self.cluster
        strategies = enumerate_strategies(op, mesh)
        if self.orders:
            strategies = strategies_in_orders(op, strategies, self.orders)
        seconds = strategy_seconds(op, strategies, mesh, cluster)
        if must_split:
            is_split = strategies.share <= strategies.share.min() * 1.001
            seconds = np.where(is_split, seconds, np.inf)
        operands, results = (
            tuple(map(self.specs.choices, specs.swapaxes(0, 1)))
            for specs in (strategies.operand_specs, strategies.result_specs)
        )
        read = zip(op.operands, operands, strict=True)
        sizes = [kind.bytes for kind in op.result_types]
        return Pattern(
            "operator",
            seconds,
            held_bytes("operator", sizes, results, len(seconds)),
            results,
            tuple([specs for operand, specs in read if isinstance(operand, int)]),
            strategies,
        )

    def add_tensor(
        self,
        kind: VertexKind,
        choices: SpecChoices,
        writes: Sequence[Write],
        reads: Sequence[Read],
        seconds: np.ndarray | None = None,
        name: str = "",
    ) -> None:
        """A vertex whose choices are specs of one tensor, in all that it reads and
        writes; these may have leading dims more. A port has a `name` of its own."""
        sizes = [self.num_bytes[self.type_of[tensor]] for tensor, _ in writes]
        seconds = self.sharing(0.0 * choices.fractions if seconds is None else seconds)
        more = tuple([e for _, e in writes]), tuple([extra for _, extra, _ in reads])
        key = kind, id(choices), id(seconds), tuple(sizes), more
        number = self.known.get(key)
        if number is None:
            written, read = (
                tuple([self.specs.shifted(choices, extra) for extra in each])
                for each in more
            )
            held = held_bytes(kind, sizes, written, len(seconds))
            number = self.add_pattern(Pattern(kind, seconds, held, written, read))
            self.known[key] = number
        vertex = len(self.pattern)
        self.pattern.append(number)
        self.row.append(-1)
        if name:
            self.names[vertex] = name
        written, read = self.accesses[number]
        for (tensor, _), own in zip(writes, written, strict=True):
            self.writes.append((vertex, tensor, own))
        for (tensor, _, site), own in zip(reads, read, strict=True):
            kind_of_site = NO_SITE if kind == "relay" else SITES[site[0]]
            self.reads.append((vertex, tensor, own, kind_of_site, *site[1:]))

    def add_pattern(self, pattern: Pattern) -> int:
        """The number of a new pattern."""
        self.patterns.append(pattern)
        written, read = map(self.numbered, pattern.writes), pattern.reads
        self.accesses.append(([*written], [*map(self.numbered, read)]))
        return len(self.patterns) - 1

    def numbered(self, choices: SpecChoices) -> int:
        number = self.numbers.setdefault(id(choices), len(self.choices))
        if number == len(self.choices):
            self.choices.append(choices)
        return number

    def sharing(self, array: np.ndarray) -> np.ndarray:
        """One object for equal arrays."""
        return self.shared.setdefault(array.tobytes(), array)

    def legal_specs(
        self,
        kind: TensorType,
        *,
        pending: bool,
        whole: bool = False,
        pin: Pin | None = None,
    ) -> SpecChoices:
        """The specs of a tensor: of those allowed, `whole` the replicated one alone."""
        key = kind, pending, whole, pin
        if key not in self.legal:
            legal = in_orders(
                tensor_specs(kind, self.mesh, pending=pending), self.orders
            )
            if whole:
                legal = iter([replicated(self.mesh.num_axes)])
            allowed = [spec for spec in legal if pin is None or pin.allows(spec)]
            self.legal[key] = self.specs.choices(np.array(allowed))
        return self.legal[key]

    def owed(self, choices: SpecChoices, kind: TensorType) -> np.ndarray:
        """[choices] the least seconds for what each owes of a sum; 0 if all owe one."""
        complete = [spec for spec in choices.distinct if not is_pending(spec)]
        if len(complete) in (0, len(choices.distinct)):
            return np.zeros(len(choices.classes))
        by_size = self.resharder.by_size(choices.distinct, complete)
        return at_size(by_size, kind.bytes).min(axis=1)[choices.classes]

    # Edges.

    def connected(self) -> ShardingProblem:
        """The problem, with relays for tensors that several read."""
        graph = self.graph
        writes, reads = self.accesses_of(WRITES), self.accesses_of(READS)
        write_of = np.full(len(graph.tensors), -1)
        write_of[writes[:, 1]] = np.arange(len(writes))

        # Relays, in the order in which their tensors are read first.
        tensors, first, times = np.unique(
            reads[:, 1], return_index=True, return_counts=True
        )
        turn = np.zeros(len(graph.tensors), np.intp)
        turn[tensors] = first
        shared = tensors[times > 1]
        shared = shared[np.argsort(turn[shared])]
        number, makers = np.arange(len(shared)), write_of[shared]
        before = len(self.reads)
        for tensor, at in zip(shared.tolist(), makers.tolist(), strict=True):
            self.add_relay(tensor, self.choices[writes[at, 2]])
        relays = np.array(self.reads[before:], np.intp).reshape(-1, 6)

        # What says where another operand lies reads the tensor as it was made.
        rows = graph.columns.where(lambda op: op.kind == RELAYOUT_LIKE)
        like = graph.columns.index[rows]
        is_like = (reads[:, 3] == OPERAND) & (reads[:, 5] == 1)
        is_like &= np.isin(reads[:, 4], like)
        through = write_of.copy()
        through[shared] = len(writes) + number
        source = np.where(is_like, write_of[reads[:, 1]], through[reads[:, 1]])
        to_relays = makers, len(reads) + number, 0 * number
        to_readers = source, np.arange(len(reads)), is_like
        order = np.argsort(turn[np.append(shared, reads[:, 1])], kind="stable")
        edges = np.concatenate([to_relays, to_readers], axis=1)[:, order]

        writes = np.concatenate([writes, relays[:, :3]])
        reads = np.concatenate([reads, relays])
        is_between = writes[edges[0], 0] != reads[edges[1], 0]
        edges = edges[:, is_between]  # else a vertex has one spec for both
        visible = visible_fractions(graph, self.cluster)
        types, type_of = self.edge_types(writes, reads, edges, visible)
        write, read, _ = edges
        joined = TypedEdges.of(types, type_of, writes[write, 0], reads[read, 0])
        is_priced = np.array([each is not None for each in types], bool)[type_of]
        own = VertexColumns(
            graph,
            tuple(self.patterns),
            np.array(self.pattern, np.intp),
            np.array(self.row, np.intp),
            Accesses.of(writes, len(self.pattern)),
            Accesses.of(reads, len(self.pattern)),
            tuple(self.choices),
            self.names,
        )
        return ShardingProblem(
            graph,
            self.mesh,
            own,
            ChoiceGraph(own.nodes, joined),
            dict(zip(shared.tolist(), relays[:, 0].tolist(), strict=True)),
            {tensor: at for tensor, at in enumerate(write_of.tolist()) if at >= 0},
            own,
            visible,
            write[is_priced],
            read[is_priced],
        )

    def accesses_of(self, side: int) -> np.ndarray:
        """[accesses, columns] what vertices write, or read, by vertex."""
        columns, rows = self.graph.columns, np.array(self.row, np.intp)
        if side == WRITES:
            others, row, tensor = self.writes, columns.rows_of_results, columns.results
        else:
            others, row, tensor = self.reads, columns.rows_of_operands, columns.operands
        others = np.array(others, np.intp).reshape(-1, 3 if side == WRITES else 6)
        vertex_of = np.full(len(self.alike), -1)
        vertex_of[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        position = np.arange(len(row)) - np.searchsorted(row, row)
        kept = (tensor >= 0) & (vertex_of[row] >= 0)
        row = row[kept]
        vertex = vertex_of[row]
        choices = [each[side] for each in self.accesses]  # of patterns
        begin = np.cumsum([0, *map(len, choices)])[
            np.array(self.pattern, np.intp)[vertex]
        ]
        place = begin + np.arange(len(row)) - np.searchsorted(row, row)
        flat = np.array(list(chain.from_iterable(choices)), np.intp)
        site = np.full(len(row), OPERAND), columns.index[row], position[kept]
        own = np.stack([vertex, tensor[kept], flat[place], *site], axis=1)
        found = np.concatenate([others, own[:, : others.shape[1]]])
        return found[np.argsort(found[:, 0], kind="stable")]

    def add_relay(self, tensor: int, made: SpecChoices) -> None:
        """A shared copy of a tensor, which is made in some of the choices `made`."""
        kind = self.graph.tensors[tensor].type
        choices = self.legal_specs(kind, pending=made.may_be_pending)
        read: Read = (tensor, 0, ("operand", 0, 0))
        self.add_tensor("relay", choices, [(tensor, 0)], [read])

    def edge_types(
        self,
        writes: np.ndarray,
        reads: np.ndarray,
        edges: np.ndarray,
        visible: np.ndarray,
    ) -> tuple[list[EdgeType | None], np.ndarray]:
        """The types of edges, and that of each (write, read, as made)."""
        columns, blocks = self.graph.columns, [b.weight for b in self.graph.blocks]
        write, read, as_made = edges
        tensor = reads[read, 1]
        sizes, size = np.unique(self.num_bytes, return_inverse=True)
        weights, weight = np.unique(
            np.array(blocks)[columns.block_of_tensors] * visible, return_inverse=True
        )
        size, weight = size[columns.type_of[tensor]], weight[tensor]
        first, second = writes[write, 2], reads[read, 2]
        examples, kinds = equal_rows(first, second, size, weight, as_made)
        columns = first, second, sizes[size], weights[weight], as_made
        each_kind = zip(*(column[examples].tolist() for column in columns), strict=True)
        return [self.edge_type(*each) for each in each_kind], kinds

    def edge_type(
        self, source: int, target: int, size: int, weight: float, as_made: bool
    ) -> EdgeType | None:
        """Classes and costs of an edge; None where all are 0.

        `as_made`: the tensor is read in the spec that it has.
        """
        sources, targets = self.choices[source], self.choices[target]
        if as_made:
            pairs = [[s == t for t in targets.distinct] for s in sources.distinct]
            return sources.classes, targets.classes, np.where(pairs, 0.0, np.inf)
        pair = sources.distinct, targets.distinct
        if pair not in self.by_size:
            self.by_size[pair] = self.resharder.by_size(*pair)
        costs = at_size(self.by_size[pair], size) * weight
        return (sources.classes, targets.classes, costs) if costs.any() else None


def held_bytes(
    kind: VertexKind, sizes: Sequence[int], writes: Sequence[SpecChoices], count: int
) -> np.ndarray:
    """[choices] the bytes of what a vertex writes, given its tensors' bytes."""
    held = np.zeros(count)
    for whole, choices in zip(sizes, writes, strict=True):
        part = whole * choices.fractions
        # All that a port writes is one memory, inside a loop and out.
        held = np.maximum(held, part) if kind == "port" else held + part
    return held
