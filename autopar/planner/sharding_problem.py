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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, Edge, Node

from ..clusters.cluster import Cluster
from ..costs.host_memory import host_seconds_per_byte
from ..frontend.garbage import without_garbage_collection
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Operator, OpGraph, TensorType
from ..graph.ports import Site, ports_of
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.resharding import Resharder
from ..sharding.spec import replicated
from .operator_choices import OperatorTable
from .overlap import visible_fractions
from .relay_choices import is_copied, lasting_tensors, twice
from .reshard_edges import ReshardEdges
from .spec_choices import SpecChoices, SpecTable
from .strategies import (
    Strategies,
    is_heavy_operator,
    operators_to_split,
    tensor_specs,
)

VertexKind = Literal["operator", "home", "port", "relay", "result"]


@dataclass(frozen=True, eq=False)
class Access:
    """A tensor as one vertex writes or reads it: its spec under each choice.

    `site` says which operand or block output a read is; None for writes and relays.
    """

    tensor: int
    choices: SpecChoices
    site: Site | None = None


@dataclass(frozen=True, eq=False)
class Vertex:
    """One decision: cost and bytes of each choice, and what it writes and reads."""

    kind: VertexKind
    name: str
    seconds: np.ndarray
    bytes: np.ndarray
    writes: tuple[Access, ...]
    reads: tuple[Access, ...]
    operator: int | None = None
    strategies: Strategies | None = None


@dataclass(frozen=True, eq=False)
class ShardingProblem:
    """Vertices, and the same as a `ChoiceGraph` (node i is vertex i)."""

    graph: OpGraph
    mesh: MeshShape
    vertices: tuple[Vertex, ...]
    choice_graph: ChoiceGraph
    relays: dict[int, int]  # vertex by tensor
    writers: dict[int, tuple[int, Access]]  # (vertex, access) by tensor


@without_garbage_collection
def build_problem(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    resharder: Resharder,
    pins: Mapping[int, Pin] | None = None,
    *,
    counts_memory: bool = False,
) -> ShardingProblem:
    """All vertices and edges of planning `graph` on `mesh`.

    `pins` are those of arguments, by tensor: their homes have only the specs allowed.
    `counts_memory`: relays are those of `relay_choices.py`; live sets see copies.
    """
    builder = _Builder(graph, mesh, cluster, resharder, counts_memory)
    builder.add_homes(pins or {})
    for block in graph.blocks:
        for op in block.operators:
            builder.add_operator(op)
    builder.add_results()
    builder.connect()
    choice_graph = ChoiceGraph(
        tuple(Node(v.name, v.seconds, v.bytes) for v in builder.vertices),
        tuple(builder.edges),
    )
    return ShardingProblem(
        graph,
        mesh,
        tuple(builder.vertices),
        choice_graph,
        builder.relays,
        builder.writers,
    )


class _Builder:
    def __init__(
        self,
        graph: OpGraph,
        mesh: MeshShape,
        cluster: Cluster,
        resharder: Resharder,
        counts_memory: bool,
    ) -> None:
        self.graph, self.mesh, self.cluster = graph, mesh, cluster
        self.counts_memory = counts_memory
        self.lasting = lasting_tensors(graph) if counts_memory else frozenset()
        self.vertices: list[Vertex] = []
        self.edges: list[Edge] = []
        self.heavy: set[int] = set()  # vertices
        self.relays: dict[int, int] = {}
        self.writers: dict[int, tuple[int, Access]] = {}
        self.resharding = ReshardEdges(resharder)
        self.visible = visible_fractions(graph, cluster)
        self._specs = SpecTable(mesh.axis_sizes)
        must_split = operators_to_split(graph)
        self.operators = OperatorTable(mesh, cluster, self._specs, must_split)
        self._legal: dict[object, SpecChoices] = {}
        self._held: dict[object, np.ndarray] = {}
        self._zeros: dict[int, np.ndarray] = {}

    def add_vertex(
        self,
        kind: VertexKind,
        name: str,
        seconds: np.ndarray,
        writes: Sequence[Access],
        reads: Sequence[Access],
        operator: int | None = None,
        strategies: Strategies | None = None,
    ) -> int:
        held = self._held_bytes(kind, len(seconds), writes)
        vertex = Vertex(
            kind,
            name,
            seconds,
            held,
            tuple(writes),
            tuple(reads),
            operator,
            strategies,
        )
        index = len(self.vertices)
        self.vertices.append(vertex)
        if kind != "relay":
            for access in writes:
                self.writers[access.tensor] = (index, access)
        return index

    def _held_bytes(
        self, kind: VertexKind, num_choices: int, writes: Sequence[Access]
    ) -> np.ndarray:
        """[choices] the bytes of what a vertex writes; one array for equal vertices."""
        tensors = self.graph.tensors
        sizes = [tensors[access.tensor].type.bytes for access in writes]
        is_beside = kind == "relay" and writes[0].tensor in self.lasting
        key = (
            *(kind == "port", is_beside, num_choices, *sizes),
            *[id(access.choices) for access in writes],
        )
        if key not in self._held:
            held = np.zeros(num_choices)
            for whole, access in zip(sizes, writes, strict=True):
                part = whole * access.choices.fractions
                # All that a port writes is one memory, inside a loop and out.
                held = np.maximum(held, part) if kind == "port" else held + part
            self._held[key] = held * is_copied(num_choices) if is_beside else held
        return self._held[key]

    def spec_vertex(
        self,
        kind: VertexKind,
        name: str,
        tensor_type: TensorType,
        writes: Sequence[tuple[int, int]],
        reads: Sequence[tuple[int, int, Site | None]],
        *,
        pending: bool,
        whole: bool = False,
        pin: Pin | None = None,
        seconds_per_byte: float = 0.0,
    ) -> int:
        """A vertex whose choices are specs of one tensor.

        Written and read tensors come with the number of leading dims they have more
        than `tensor_type` (1 for what a scan slices or stacks). `whole`: the program
        itself holds the value, so it can only be replicated. `seconds_per_byte` are of
        what a device has of the tensor.
        """
        choices = self._legal_specs(tensor_type, pending, whole)
        if pin is not None:
            specs = [s for s in choices.specs.tolist() if pin.allows(tuple(s))]
            choices = self._specs.choices(np.array(specs))
        if kind == "relay" and writes[0][0] in self.lasting:
            choices = self._specs.choices(twice(choices.specs))
        seconds = self._zeros.setdefault(len(choices.classes), choices.fractions * 0.0)
        if seconds_per_byte:
            seconds = choices.fractions * (tensor_type.bytes * seconds_per_byte)
        shifted = self._specs.shifted
        return self.add_vertex(
            kind,
            name,
            seconds,
            [Access(tensor, shifted(choices, extra)) for tensor, extra in writes],
            [Access(t, shifted(choices, extra), site) for t, extra, site in reads],
        )

    def _legal_specs(self, kind: TensorType, pending: bool, whole: bool) -> SpecChoices:
        key = (kind, pending, whole)
        if key not in self._legal:
            legal = tensor_specs(kind, self.mesh, pending=pending)
            if whole:
                legal = (replicated(self.mesh.num_axes),)
            self._legal[key] = self._specs.choices(np.array(legal))
        return self._legal[key]

    def add_homes(self, pins: Mapping[int, Pin]) -> None:
        for graph_input in self.graph.inputs:
            tensor = self.graph.tensors[graph_input.tensor]
            reads: list[tuple[int, int, Site | None]] = []
            if graph_input.output is not None:
                operand = self.graph.outputs[graph_input.output]
                if isinstance(operand, int):
                    reads.append((operand, 0, ("output", 0, graph_input.output)))
            self.spec_vertex(
                "home",
                tensor.name,
                tensor.type,
                [(tensor.index, 0)],
                reads,
                pending=False,
                pin=pins.get(tensor.index),
                seconds_per_byte=host_seconds_per_byte(graph_input, self.cluster),
            )

    def add_results(self) -> None:
        """Outputs that are not state lie as the program leaves them, none pending."""
        tied = {i.output for i in self.graph.inputs}
        for position, operand in enumerate(self.graph.outputs):
            if isinstance(operand, int) and position not in tied:
                self.spec_vertex(
                    "result",
                    self.graph.output_paths[position],
                    self.graph.tensors[operand].type,
                    [],
                    [(operand, 0, ("output", 0, position))],
                    pending=False,
                )

    def add_operator(self, op: Operator) -> None:
        if op.kind in STRUCTURED:
            for port in ports_of(self.graph, op):
                self.spec_vertex(
                    "port",
                    port.name,
                    port.type,
                    port.writes,
                    port.reads,
                    pending=port.may_be_pending(self.mesh),
                    whole=port.is_whole,
                    pin=port.pin(self.mesh),
                )
            return
        choices = self.operators.of(op)
        weight = self.graph.blocks[op.block].weight
        if is_heavy_operator(op):
            self.heavy.add(len(self.vertices))
        self.add_vertex(
            "operator",
            op.name,
            self.operators.seconds(choices, weight),
            [
                Access(tensor, specs)
                for tensor, specs in zip(op.results, choices.results, strict=True)
            ],
            [
                Access(operand, specs, ("operand", op.index, position))
                for position, (operand, specs) in enumerate(
                    zip(op.operands, choices.operands, strict=True)
                )
                if isinstance(operand, int)
            ],
            op.index,
            choices.strategies,
        )

    def connect(self) -> None:
        """Edges from each tensor's writer to its readers, by a relay if many."""
        readers: dict[int, list[tuple[int, Access]]] = {}
        for index, vertex in enumerate(self.vertices):
            for access in vertex.reads:
                readers.setdefault(access.tensor, []).append((index, access))
        for tensor_index, reads in readers.items():
            writer, access = self.writers[tensor_index]
            if len(reads) > 1 or (self.counts_memory and writer in self.heavy):
                tensor = self.graph.tensors[tensor_index]
                relay = self.spec_vertex(
                    "relay",
                    f"copy of {tensor.name}",
                    tensor.type,
                    [(tensor_index, 0)],
                    [(tensor_index, 0, None)],
                    pending=access.choices.may_be_pending,
                )
                self.relays[tensor_index] = relay
                self.add_edge(writer, access, relay, self.vertices[relay].reads[0])
                writer, access = relay, self.vertices[relay].writes[0]
            for reader, read in reads:
                self.add_edge(writer, access, reader, read)

    def add_edge(self, writer: int, write: Access, reader: int, read: Access) -> None:
        if writer == reader:  # both ends have the same spec under every choice
            return
        index = write.tensor
        tensor = self.graph.tensors[index]
        weight = self.graph.blocks[tensor.block].weight * self.visible[index]
        sources, targets = write.choices, read.choices
        matrix = self.resharding.costs(sources, targets, tensor.type.bytes, weight)
        if self.counts_memory:
            relay = self.relays.get(index)
            if relay == reader and index in self.lasting:
                ends = (writer, reader, sources, targets)
                self.edges.append(self.resharding.to_lasting_relay(*ends, matrix))
                return
            if relay == writer and matrix is not None:
                matrix = self.resharding.without_growth(sources, targets, matrix)
        if matrix is not None:
            classes = sources.classes, targets.classes
            self.edges.append(Edge(writer, reader, *classes, matrix))
