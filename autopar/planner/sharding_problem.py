"""The intra-operator problem as a choice graph: vertices that write and read tensors.

Four kinds of vertex, each with one choice per strategy or spec:

  operator  its strategies: every operand and result has a spec under each
  home      where an argument lies; for state, its next value must come back to it
  port      a tensor that enters or leaves a loop, branch or barrier, in one spec
  relay     a shared copy of a tensor that several read: resharded once, read by all

An edge between the writer of a tensor (or its relay) and each reader costs the
resharding from the one's spec to the other's, times the trip count of its block.
Operators in a scan body are vertices of the same problem, their costs times the trips.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, TypedEdges

from ..clusters.cluster import Cluster
from ..costs.host_memory import host_seconds_per_byte
from ..costs.resharding import Resharder
from ..costs.scan_outputs import stack_seconds_per_byte
from ..graph.build_graph import RELAYOUT_LIKE, STRUCTURED
from ..graph.garbage import without_garbage_collection
from ..graph.op_graph import GraphInput, OpGraph, TensorType
from ..graph.pins import Pin
from ..graph.ports import Site, ports_of
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec
from .axis_orders import Orders, orders_of_step
from .equal_rows import equal_rows
from .operator_choices import OperatorTable
from .overlap import visible_fractions
from .reshard_edges import ReshardEdges
from .spec_choices import SpecTable
from .spec_patterns import SpecPatterns, held_bytes
from .strategies import operators_to_split
from .vertex_builder import VertexBuilder
from .vertices import (
    OPERAND,
    Access,
    Pattern,
    VertexColumns,
    Writers,
)


@dataclass(frozen=True, eq=False)
class ShardingProblem:
    """Vertices, and the same as a `ChoiceGraph` (node i is vertex i).

    `columns` are the vertices as they were built: `vertices` may cost otherwise.
    `visible` [tensors] is the part of the seconds of moving each that a step waits for.
    `edge_writes` and `edge_reads` [edges] are the places among the writes and reads of
    `columns` of what each edge joins.
    """

    graph: OpGraph
    mesh: MeshShape
    vertices: VertexColumns
    choice_graph: ChoiceGraph
    relays: Mapping[int, int]  # vertex by tensor
    writers: Mapping[int, tuple[int, Access]]  # (vertex, access) by tensor
    columns: VertexColumns
    visible: np.ndarray
    edge_writes: np.ndarray
    edge_reads: np.ndarray

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
    orders = orders_of_step(graph, mesh, (pins or {}).values(), demanded)
    builder = _Builder(graph, mesh, cluster, resharder, orders)
    builder.add_homes(pins or {})
    rows, pattern = builder.add_operators()
    builder.add_results()
    return builder.connected(builder.vertices.build(rows, pattern))


class _Builder:
    def __init__(
        self,
        graph: OpGraph,
        mesh: MeshShape,
        cluster: Cluster,
        resharder: Resharder,
        orders: Orders,
    ) -> None:
        self.graph, self.mesh, self.cluster = graph, mesh, cluster
        self.vertices = VertexBuilder(graph)
        self.resharding = ReshardEdges(resharder)
        self.visible = visible_fractions(graph, cluster)
        specs = SpecTable(mesh.axis_sizes)
        self.must_split = operators_to_split(graph)
        self.operators = OperatorTable(mesh, cluster, specs, self.must_split, orders)
        given = mesh, orders, specs, self.vertices, self.resharding
        self.patterns = SpecPatterns(*given)

    def add_homes(self, pins: Mapping[int, Pin]) -> None:
        """Where arguments lie; for state, its next value must come back to it."""
        known, numbers = dict[object, int](), list[int]()
        tensors, outputs = self.graph.tensors, self.graph.outputs
        place = self.graph.columns.type_of.tolist()
        for each in self.graph.inputs:
            tensor, output = each.tensor, each.output
            num_reads = 0 if output is None else int(isinstance(outputs[output], int))
            pin = pins.get(tensor) if pins else None
            key = place[tensor], num_reads, each.role, each.num_runs, each.memory, pin
            number = known.get(key)
            if number is None:
                kind = tensors[tensor].type
                number = known[key] = self._home(each, kind, num_reads, pin)
            numbers.append(number)
        self.vertices.add_homes(numbers, self.graph.inputs, outputs)

    def _home(
        self, given: GraphInput, kind: TensorType, num_reads: int, pin: Pin | None
    ) -> int:
        """The pattern of the home of an argument."""
        is_sum = given.role == "sum"
        return self.patterns.of(
            *("home", kind, [(kind.bytes, 0)], [0] * num_reads),
            pending=is_sum,
            pin=pin,
            sum_runs=given.num_runs if num_reads and is_sum else 0,
            seconds_per_byte=host_seconds_per_byte(given, self.cluster),
        )

    def add_results(self) -> None:
        """Outputs that are not state lie as the program leaves them, none pending."""
        place = len(self.graph.operators())
        tied = {i.output for i in self.graph.inputs}
        for position, operand in enumerate(self.graph.outputs):
            if isinstance(operand, int) and position not in tied:
                kind = self.graph.tensors[operand].type
                pattern = self.patterns.of("result", kind, reads=[0], pending=False)
                site: Site = ("output", 0, position)
                self.vertices.add(place, pattern, [], [(operand, site)])

    def add_operators(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of operators with strategies, and their patterns; others' ports."""
        columns = self.graph.columns
        is_port = columns.where(lambda op: op.kind in STRUCTURED)
        for row in np.flatnonzero(is_port).tolist():
            self._add_ports(row)
        rows = np.flatnonzero(~is_port)
        must_split = np.isin(columns.index[rows], sorted(self.must_split))
        examples, pattern = equal_rows(
            columns.alike[rows], must_split, columns.block_of[rows]
        )
        numbers = [self._operator_pattern(row) for row in rows[examples].tolist()]
        return rows, np.array(numbers, np.intp)[pattern]

    def _operator_pattern(self, row: int) -> int:
        """The pattern of all operators like this one, in its block."""
        op = self.graph.operators()[row]
        choices = self.operators.of(op)
        weight = self.graph.blocks[op.block].weight
        sizes = [kind.bytes for kind in op.result_types]
        seconds = self.operators.seconds(choices, weight)
        written = list(zip(sizes, choices.results, strict=True))
        reads = zip(op.operands, choices.operands, strict=True)
        return self.vertices.add_pattern(
            Pattern(
                "operator",
                seconds,
                held_bytes("operator", written, len(seconds)),
                choices.results,
                tuple([specs for operand, specs in reads if isinstance(operand, int)]),
                choices.strategies,
            )
        )

    def _add_ports(self, row: int) -> None:
        tensors, op = self.graph.tensors, self.graph.operators()[row]
        for port in ports_of(self.graph, op):
            times = self.graph.blocks[op.bodies[0]].weight if port.is_stacked else 0.0
            pattern = self.patterns.of(
                "port",
                port.type,
                [(tensors[tensor].type.bytes, extra) for tensor, extra in port.writes],
                [extra for _, extra, _ in port.reads],
                pending=port.may_be_pending(self.mesh),
                whole=port.is_whole,
                pin=port.pin(self.mesh),
                seconds_per_byte=times * stack_seconds_per_byte(self.cluster),
            )
            reads = [(tensor, site) for tensor, _, site in port.reads]
            written = [tensor for tensor, _ in port.writes]
            self.vertices.add(row, pattern, written, reads, port.name)

    def connected(self, vertices: VertexColumns) -> ShardingProblem:
        """The problem, with relays for tensors that several read."""
        reads, writes = vertices.reads, vertices.writes
        num_tensors = len(self.graph.tensors)
        access = np.full(num_tensors, -1)
        access[writes.tensor] = np.arange(len(writes.tensor))
        read, first, counts = np.unique(
            reads.tensor, return_index=True, return_counts=True
        )
        read, counts = read[np.argsort(first)], counts[np.argsort(first)]
        relayed = read[counts > 1]
        pattern = self._relay_patterns(vertices, relayed, writes.choices[access])
        whole = self.vertices.with_relays(vertices, relayed, pattern)
        edges, edge_writes, edge_reads = self._edges(whole, access, read, relayed)
        relays = range(len(vertices), len(whole))
        return ShardingProblem(
            self.graph,
            self.mesh,
            whole,
            ChoiceGraph(whole.nodes, edges),
            dict(zip(relayed.tolist(), relays, strict=True)),
            Writers(whole, access),
            whole,
            self.visible,
            edge_writes,
            edge_reads,
        )

    def _relay_patterns(
        self, vertices: VertexColumns, relayed: np.ndarray, made: np.ndarray
    ) -> np.ndarray:
        """[relayed] patterns; `made` [tensors] are the choices that tensors have."""
        tensors = self.graph.tensors
        kinds = self.graph.columns.type_of[relayed]
        examples, number = equal_rows(kinds, made[relayed])
        patterns = [
            self.patterns.of(
                *("relay", tensors[tensor].type),
                *([(tensors[tensor].type.bytes, 0)], [0]),
                pending=vertices.choices[made[tensor]].may_be_pending,
            )
            for tensor in relayed[examples].tolist()
        ]
        return np.array(patterns, np.intp)[number]

    def _edges(
        self,
        vertices: VertexColumns,
        access: np.ndarray,
        read: np.ndarray,
        relayed: np.ndarray,
    ) -> tuple[TypedEdges, np.ndarray, np.ndarray]:
        """From writers to readers, by tensor in the order of `read`.

        `access` [tensors] is the place of each tensor's writer among the writes; the
        last vertices are the relays of `relayed`. Returns, too, which write and which
        read each edge joins.
        """
        writes, reads, columns = vertices.writes, vertices.reads, self.graph.columns
        count, own = len(relayed), len(reads.tensor) - len(relayed)
        through = access.copy()  # by a relay, where there is one
        through[relayed] = np.arange(len(writes.tensor))[-count:] if count else -1
        own_tensor = reads.tensor[:own]
        tensor = np.concatenate([relayed, own_tensor])
        is_like = self._is_like(reads.site[:own])
        read_from = np.where(is_like, access[own_tensor], through[own_tensor])
        write = np.concatenate([access[relayed], read_from])
        reading = np.concatenate([np.arange(own, own + count), np.arange(own)])
        as_made = np.concatenate([np.zeros(count, bool), is_like])
        rank = np.zeros(len(self.graph.tensors), np.intp)
        rank[read] = np.arange(len(read))
        order = 2 * rank[tensor] + (np.arange(len(tensor)) >= count)
        first, second = writes.vertex[write], reads.vertex[reading]
        kept = np.argsort(order, kind="stable")
        kept = kept[first[kept] != second[kept]]  # else one spec under every choice
        tensor, as_made = tensor[kept], as_made[kept]
        weights, weight = np.unique(self._weights(), return_inverse=True)
        weight = weight.reshape(-1)[tensor]
        sources = writes.choices[write[kept]]
        targets = reads.choices[reading[kept]]
        examples, number = equal_rows(
            sources, targets, columns.type_of[tensor], weight, as_made
        )
        types = [
            self.resharding.edge_type(
                vertices.choices[sources[row]],
                vertices.choices[targets[row]],
                self.graph.tensors[tensor[row]].type.bytes,
                float(weights[weight[row]]),
                as_made=bool(as_made[row]),
            )
            for row in examples.tolist()
        ]
        edges = TypedEdges.of(types, number, first[kept], second[kept])
        is_edge = np.array([each is not None for each in types], bool)[number]
        return edges, write[kept][is_edge], reading[kept][is_edge]

    def _is_like(self, site: np.ndarray) -> np.ndarray:
        """[reads] which only say where another operand lies (`rules/relayout.py`)."""
        columns = self.graph.columns
        index = columns.index[columns.where(lambda op: op.kind == RELAYOUT_LIKE)]
        return (site[:, 0] == OPERAND) & np.isin(site[:, 1], index) & (site[:, 2] == 1)

    def _weights(self) -> np.ndarray:
        """[tensors] by how much the seconds of moving each are multiplied."""
        blocks = np.array([block.weight for block in self.graph.blocks])
        return blocks[self.graph.columns.block_of_tensors] * self.visible
