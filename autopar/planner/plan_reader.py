"""What an assignment of a sharding problem says of every tensor and operator.

Vertices of one pattern with one choice are read once; what differs between their
operators is names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import networkx
import numpy as np

from ..costs.compute import total_flops
from ..costs.resharding import Resharder
from ..costs.scan_outputs import stacking_seconds
from ..costs.user_shard_map import body_work
from ..graph.build_graph import SHARD_MAP
from ..graph.op_graph import Constant, Operator
from ..plans.plan import Conversion, InputPlan, OperatorPlan, TensorPlan
from ..sharding.spec import Spec, num_shards, replicated
from .equal_rows import equal_rows
from .halo_costs import halo_seconds
from .sharding_problem import ShardingProblem
from .vertices import NO_SITE, OUTPUT, SITE_NAMES

# What `OperatorPlan` says beside names: factors, specs of operands and results, flops,
# over how many devices, seconds.
_Work = tuple[tuple[str, ...], tuple[Spec, ...], tuple[Spec, ...], float, int, float]


class PlanReader:
    """Reads the plan that `choices`, one for each vertex, stand for."""

    def __init__(
        self, problem: ShardingProblem, choices: Sequence[int], resharder: Resharder
    ) -> None:
        self.problem, self.graph = problem, problem.graph
        self.resharder = resharder
        self.whole = replicated(problem.mesh.num_axes)
        self.choices = np.asarray(choices, np.intp)
        columns = problem.columns
        self.specs = columns.specs_by_choice[2]
        self._read = columns.chosen_specs(columns.reads, self.choices)
        written = columns.chosen_specs(columns.writes, self.choices)
        count = len(problem.relays)
        tensor = columns.writes.tensor
        self.made = np.zeros(len(self.graph.tensors), np.intp)
        self.made[tensor[: len(tensor) - count]] = written[: len(tensor) - count]
        self.relayed = dict(
            zip(problem.relays, written[len(tensor) - count :].tolist(), strict=True)
        )

    def tensor_plans(self) -> tuple[TensorPlan, ...]:
        """By tensor: the spec it is made in, and its copies."""
        return tuple(
            [
                TensorPlan(
                    tensor.name,
                    tensor.type.shape,
                    _dtype_name(tensor.type.dtype),
                    tensor.block,
                    self.specs[made],
                    self.copies.get(tensor.index, ()),
                )
                for tensor, made in zip(
                    self.graph.tensors, self.made.tolist(), strict=True
                )
            ]
        )

    @cached_property
    def copies(self) -> dict[int, tuple[Conversion, ...]]:
        """By tensor, the copies of those that are read in another spec."""
        reads = self.problem.columns.reads
        differs = (self._read != self.made[reads.tensor]) & (reads.site[:, 0] > NO_SITE)
        tensors, specs = reads.tensor[differs].tolist(), self._read[differs].tolist()
        needed: dict[int, list[int]] = {}
        for tensor, spec in zip(tensors, specs, strict=True):
            needed.setdefault(tensor, []).append(spec)
        known: dict[object, tuple[Conversion, ...]] = {}
        found: dict[int, tuple[Conversion, ...]] = {}
        made = self.made.tolist()
        for tensor, numbers in needed.items():
            size = self.graph.tensors[tensor].type.bytes
            relay = self.relayed.get(tensor)
            key = made[tensor], tuple(dict.fromkeys(numbers)), relay, size
            if key not in known:
                known[key] = cheapest_copies(
                    self.specs[key[0]],
                    [self.specs[number] for number in key[1]],
                    None if relay is None else self.specs[relay],
                    size,
                    self.resharder,
                )
            found[tensor] = known[key]
        return found

    def operator_plans(self) -> tuple[OperatorPlan, ...]:
        """By operator, in the graph's order."""
        columns, operators = self.problem.columns, self.graph.operators()
        vertices = np.flatnonzero(columns.row >= 0)
        pattern = self.problem.vertices.pattern
        examples, kinds = equal_rows(pattern[vertices], self.choices[vertices])
        works = [self._work(int(vertex)) for vertex in vertices[examples]]
        work_of = np.full(len(operators), -1)
        work_of[columns.row[vertices]] = kinds
        with_ports = np.flatnonzero(work_of < 0)
        work_of[with_ports] = len(works) + np.arange(len(with_ports))
        works += [self._work_of_ports(operators[row]) for row in with_ports.tolist()]
        return tuple(
            [
                OperatorPlan(op.name, op.kind, op.source, *works[number])
                for op, number in zip(operators, work_of.tolist(), strict=True)
            ]
        )

    def _work(self, index: int) -> _Work:
        """What a vertex of an operator says under its choice."""
        columns, choice = self.problem.columns, int(self.choices[index])
        pattern = columns.patterns[columns.pattern[index]]
        op = self.graph.operators()[columns.row[index]]
        weight = self.graph.blocks[op.block].weight
        assert pattern.strategies is not None
        factors = pattern.strategies.chosen(choice)
        sent = halo_seconds(op, factors, self.problem.mesh, self.resharder.cluster)
        seconds = self.problem.vertices[index].seconds
        reads = iter(pattern.reads)
        return (
            tuple([factor.name for factor in factors]),
            tuple(
                [
                    self.whole if isinstance(o, Constant) else next(reads).of(choice)
                    for o in op.operands
                ]
            ),
            tuple([written.of(choice) for written in pattern.writes]),
            total_flops(op) * weight,
            round(1.0 / pattern.strategies.share[choice]),
            float(seconds[choice]) - sent * weight,
        )

    def _work_of_ports(self, op: Operator) -> _Work:
        """Of a scan, barrier or shard_map: its ports decide."""
        weight, num_devices = self.graph.blocks[op.block].weight, self.problem.mesh.size
        num_flops, results = 0.0, [self.specs[self.made[each]] for each in op.results]
        sizes, cluster = self.problem.mesh.axis_sizes, self.resharder.cluster
        seconds = stacking_seconds(op, results, sizes, cluster)
        if op.kind == SHARD_MAP:
            num_flops, seconds = body_work(op, cluster)
        operands = [
            self._at_site.get(("operand", op.index, position), self.whole)
            for position in range(len(op.operands))
        ]
        return (
            (),
            tuple(operands),
            tuple(results),
            num_flops * weight * num_devices,
            num_devices if num_flops else 1,
            seconds * weight,
        )

    @cached_property
    def _at_site(self) -> dict[tuple[str, int, int], Spec]:
        """The specs in which ports read, by site."""
        columns = self.problem.columns
        reads = columns.reads
        is_site = (reads.site[:, 0] > NO_SITE) & (reads.site[:, 0] != OUTPUT)
        chosen = (columns.row[reads.vertex] < 0) & is_site
        return {
            (SITE_NAMES[kind], at, position): self.specs[number]
            for (kind, at, position), number in zip(
                reads.site[chosen].tolist(), self._read[chosen].tolist(), strict=True
            )
        }

    def outputs(self) -> Iterable[tuple[Spec, ...]]:
        """By block, the specs in which it returns its outputs."""
        reads, found = self.problem.columns.reads, dict[int, list[Spec]]()
        for block in self.graph.blocks:
            found[block.index] = [self.whole] * len(block.outputs)
        is_output = reads.site[:, 0] == OUTPUT
        _, blocks, places = reads.site[is_output].T.tolist()
        for block, place, spec in zip(
            blocks, places, self._read[is_output].tolist(), strict=True
        ):
            found[block][place] = self.specs[spec]
        return map(tuple, found.values())

    def input_plans(self) -> tuple[InputPlan, ...]:
        """Where each argument lies."""
        sizes, found = self.problem.mesh.axis_sizes, list[InputPlan]()
        for each in self.graph.inputs:
            kind = self.graph.tensors[each.tensor].type
            spec = self.specs[self.made[each.tensor]]
            held = kind.bytes // num_shards(spec, sizes)
            place = spec, kind.shape, held, each.memory
            found.append(InputPlan(each.path, each.role, *place))
        return tuple(found)


@lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    """As `dtype.name`, which numpy spells out anew each time."""
    return dtype.name


def cheapest_copies(
    made: Spec,
    needed: Iterable[Spec],
    relay: Spec | None,
    tensor_bytes: int,
    resharder: Resharder,
) -> tuple[Conversion, ...]:
    """The cheapest way to make all `needed` specs of a tensor from the one it has.

    Copies may be made from copies: a minimum spanning arborescence rooted at `made`,
    with and without the relay's spec as one more stop (Edmonds 1967).
    """
    targets = [spec for spec in dict.fromkeys(needed) if spec != made]
    if not targets:
        return ()
    if len(targets) == 1 and relay in (None, made, targets[0]):
        return (Conversion(made, targets[0]),)
    best: tuple[float, tuple[Conversion, ...]] | None = None
    stops = [targets]
    if relay is not None and relay != made and relay not in targets:
        stops.append([relay, *targets])
    for nodes in stops:
        graph = networkx.DiGraph()
        for source in [made, *nodes]:
            for target in nodes:
                if source != target:
                    seconds = resharder.seconds(source, target, tensor_bytes)
                    graph.add_edge(source, target, weight=seconds)
        tree = networkx.minimum_spanning_arborescence(graph)
        cost = sum(data["weight"] for _, _, data in tree.edges(data=True))
        order = networkx.bfs_edges(tree, made)
        if best is None or cost < best[0]:
            best = (cost, tuple(Conversion(s, t) for s, t in order))
    assert best is not None
    return best[1]
