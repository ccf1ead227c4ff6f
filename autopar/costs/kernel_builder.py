"""The kernels of a block of a planned graph: values, nodes over them, and fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..graph.build_graph import BARRIER
from ..graph.op_graph import Block
from .barriers import read_besides
from .block_reads import BlockReads
from .conversion_nodes import Conversions, add_conversions
from .equal_rows import equals_among, shared_exponentials
from .fusion import CUTTING, InMemory, Nodes, Traits, values_in_memory
from .kernels import Border, KernelBlock, KernelColumns, ValueColumns
from .loop_operands import (
    by_loop,
    carries,
    is_scatter,
    made_inside,
    read_again,
    written_apart,
)
from .names import renamed, roots
from .narrow_floats import with_wide_copies
from .node_table import NodeTable
from .plan_arrays import PlanArrays
from .product_operands import (
    add_ordered,
    flat_values,
    names_in_order,
    names_of,
    ordered_operands,
    relaid,
    turned_values,
    with_ordered,
)
from .segments import entries
from .sources import in_post_order, sources


def kernel_block(
    arrays: PlanArrays,
    traits: Traits,
    block: Block,
    border: Border,
    inner_bytes: Mapping[int, int],
) -> KernelBlock:
    """The kernels of a block.

    Args:
      arrays: specs of every tensor, operand and output.
      traits: what operators are to fusion.
      block: one of the graph's blocks.
      border: what memory it shares with its owner.
      inner_bytes: by operator, what its bodies hold, or its shards with their halos.
    """
    return _Builder(arrays, traits, block, border, inner_bytes).build()


class _Builder:
    """Things are ordered by a time: -1 for inputs, 2 k for conversions before row k of
    the block, and 2 k + 1 for the row itself."""

    def __init__(
        self,
        arrays: PlanArrays,
        traits: Traits,
        block: Block,
        border: Border,
        inner_bytes: Mapping[int, int],
    ) -> None:
        self.arrays, self.block, self.border = arrays, block, border
        columns = arrays.columns
        low, high = np.searchsorted(columns.block_of, (block.index, block.index + 1))
        self.rows, self.count = slice(low, high), int(high - low)
        self.operators = columns.operators[low:high]
        self.renames = traits.renames[self.rows].copy()
        self.traits = traits
        self.inner_bytes = inner_bytes
        self.flat, self.wide = frozenset[int](), dict[int, int]()
        self.reads = BlockReads(arrays, block, self.rows)
        self.equals = equals_among(arrays, self.rows, self.reads.start, self.reads.spec)
        self.renames[list(self.equals)] = True
        self._number_values()
        self._name_values()
        own = self.reads.conversions, self.value_of, self.of_copies
        self.moves = Conversions(*own, arrays)
        self.made = columns, self.rows, self.result_row, self.of_results

    def _number_values(self) -> None:
        """Inputs, conversions, results, and what has to be passed at a barrier."""
        arrays, columns = self.arrays, self.arrays.columns
        self.inputs = np.array(self.block.inputs, np.intp)
        copies = np.array(self.reads.conversions, np.intp).reshape(-1, 4)
        chosen = slice(*columns.result_start[[self.rows.start, self.rows.stop]])
        row = columns.rows_of_results[chosen] - self.rows.start
        is_new = ~self.renames[row]
        self.result_row, result = row[is_new], columns.results[chosen][is_new]
        is_barrier = columns.where(lambda op: op.kind == BARRIER)[self.rows]
        barriers = np.flatnonzero(is_barrier & self.renames).tolist()
        lets_pass = [len(self.operators[k].results) for k in barriers]
        self.barriers = np.array(barriers, np.intp)
        self.passing_rows = np.repeat(self.barriers, lets_pass)
        counts = [len(self.inputs), len(copies), len(result), len(self.passing_rows)]
        time = np.concatenate(
            [
                np.full(counts[0], -1),
                2 * copies[:, 0],
                2 * self.result_row + 1,
                2 * self.passing_rows + 1,
            ]
        )
        tensor = np.concatenate(
            [self.inputs, copies[:, 1], result, np.full(counts[3], -1)]
        )
        spec = np.concatenate(
            [
                *(arrays.made[self.inputs], copies[:, 2], arrays.made[result]),
                np.full(counts[3], -1),
            ]
        )
        self.is_outside_input = self.border.is_outside(counts[0])
        kind = np.repeat(np.arange(4), counts)
        is_outside = kind == 3
        is_outside[: counts[0]] = self.is_outside_input
        order = np.argsort(time, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        self.of_copies, self.of_results, self.of_barriers = (
            number[kind == k] for k in (1, 2, 3)
        )
        held = arrays.bytes_of(tensor, spec)
        held[kind == 3] = 0
        self.values = ValueColumns(
            *(tensor[order], spec[order], held[order], (kind == 1)[order]),
            *(is_outside[order], arrays.specs),
        )
        self.value_of = np.full(len(arrays.made), -1)  # [tensors] as they are made
        self.value_of[self.inputs] = number[: counts[0]]
        self.value_of[result] = self.of_results

    def _name_values(self) -> None:
        """Other names of values: what renaming rows make. Then, what each read is."""
        columns, rows = self.arrays.columns, self.rows
        read, copy = (self.reads.start, self.reads.tensor), self.reads.converted
        own = copy >= 0
        same, at = renamed(columns, rows, self.renames, self.equals, read)
        copied = np.flatnonzero(at >= 0)
        copied = copied[own[at[copied]]]
        self.value_of[copied] = self.of_copies[copy[at[copied]]]
        same[copied] = copied
        self.value_of = self.value_of[roots(same)]
        self.read = self.value_of[self.reads.tensor]
        self.read[own] = self.of_copies[copy[own]]

    def _passed(self) -> dict[int, int]:
        """By value of a barrier, what it lets pass."""
        read = self.read[np.isin(self.reads.row, self.barriers)]
        return dict(zip(self.of_barriers.tolist(), read.tolist(), strict=True))

    def build(self) -> KernelBlock:
        """Nodes and their fusion, then a kernel for each that is not fused."""
        outputs = self._outputs()
        gone = self.border.stored | self.border.sent
        kept = tuple(
            dict.fromkeys(
                value
                for position, value in enumerate(outputs)
                if value is not None and position not in gone
            )
        )
        is_kept = np.zeros(len(self.values), bool)
        is_kept[list(kept)] = True
        shared = shared_exponentials(self.arrays.columns, self.rows, self.value_of)
        is_kept[list(shared.values())] = True
        pairs = [(old, outputs[new]) for old, new in self.border.replaced]
        first = len(self.values)
        nodes, in_memory = self._fused(outputs, is_kept)
        return KernelBlock(
            self.values,
            self._kernels(nodes, in_memory, shared),
            kept,
            tuple((old, new) for old, new in pairs if new is not None and new != old),
            self._passed(),
            flat_values(*self.made) | self.flat,
            self.wide,
            relaid(self.ordered, first),
            self.moves.exchanged(),
            self.arrays.is_alone,
        )

    def _outputs(self) -> list[int | None]:
        """The values that are returned, None for literals.

        Of what a loop makes that reads again what it replaces, it is a copy.
        """
        found = iter(self.read[self.reads.start[self.count] :].tolist())
        outputs = [next(found) if is_read else None for is_read in self.reads.returned]
        rows, index = self._rows_with_bodies(), self.arrays.columns.index[self.rows]
        is_made = np.isin(self.result_row, rows)
        made = self.of_results[is_made].tolist()
        maker = dict(zip(made, index[self.result_row[is_made]].tolist(), strict=True))
        pairs = [(old, outputs[new]) for old, new in self.border.replaced]
        apart = written_apart(self._read_again(), maker, pairs)
        nothing, first = np.full(len(apart), -1), len(self.values)
        self.apart = {value: first + k for k, value in enumerate(apart)}
        self.values = self.values.with_copies(apart, tensor=nothing, spec=nothing)
        for _, new in self.border.replaced:
            if (value := outputs[new]) is not None:
                outputs[new] = self.apart.get(value, value)
        return outputs

    def _fused(
        self, outputs: Sequence[int | None], is_kept: np.ndarray
    ) -> tuple[Nodes, InMemory]:
        """Nodes, and which values are in memory, with what products read in order."""
        apart = self.of_copies[self.moves.gathered], turned_values(*self.made)
        own = self.rows, self.reads.start, self.reads.spec, self.read
        found = self.ordered = ordered_operands(self.arrays, *own, *apart)
        self.values, self.read = with_ordered(found, self.values, self.read)
        nodes, own = self._nodes(outputs), len(self.values)
        if self.arrays.widens:
            nodes = self._wide(nodes, names_of(found, own))
        is_kept = np.append(is_kept, np.zeros(len(self.values) - len(is_kept), bool))
        in_memory = values_in_memory(nodes, is_kept)
        is_named = (in_memory.is_written & ~in_memory.again)[:own]
        name = np.arange(len(self.values))
        name[:own] = names_in_order(found, is_named)
        in_memory = in_memory.without(name != np.arange(len(name)))
        in_memory = in_memory.made_once(list(self._passed().values()))
        self.read = name[self.read]
        return replace(nodes, reads=name[nodes.reads]), in_memory

    def _nodes(self, outputs: Sequence[int | None]) -> Nodes:
        border, table = self.border, NodeTable()
        inside = np.flatnonzero(~self.is_outside_input)
        is_cut = np.isin(inside, sorted(border.sliced))
        own = np.arange(len(inside))
        table.add(
            np.full(len(inside), -1),
            cheap=is_cut,
            repeated=is_cut,
            writes=(own, inside),
        )
        add_conversions(self.moves, self.values.bytes, self._read_by_loops(), table)
        add_ordered(self.ordered, len(self.values), table)
        self._add_rows(table)
        pairs = np.array(list(self.apart.items()), np.intp).reshape(-1, 2)
        own, times = np.arange(len(pairs)), np.full(len(pairs), 2 * self.count + 1)
        table.add(times, reads=(own, pairs[:, 0]), writes=(own, pairs[:, 1]))
        for time, positions in enumerate((border.stored, border.sent)):
            found = [outputs[position] for position in sorted(positions)]
            read = np.array([value for value in found if value is not None], np.intp)
            times, own = np.full(len(read), 2 * self.count + 1), np.arange(len(read))
            is_send = time > 0
            table.add(
                times,
                cheap=not is_send,
                absorbs=not is_send,
                send=is_send,
                reads=(own, read),
            )
        return table.build()

    def _read_by_loops(self) -> np.ndarray:
        """The values that rows with bodies read."""
        return self.read[np.isin(self.reads.row, self._rows_with_bodies())]

    def _add_rows(self, table: NodeTable) -> None:
        """Rows that are no other names, and barriers."""
        is_node = ~self.renames
        is_node[self.barriers] = True
        parts = self._parts()
        rows = np.flatnonzero(is_node).repeat(parts[:-1][is_node])
        place = np.full(self.count + 1, -1)
        place[rows[::-1]] = np.arange(len(rows))[::-1]  # the first of each
        held = self.values.bytes
        read_bytes, made_bytes = np.zeros((2, self.count + 1), np.int64)
        np.maximum.at(read_bytes, self.reads.row, held[self.read])
        np.maximum.at(made_bytes, self.result_row, held[self.of_results])
        own = self.rows.start + rows
        traits = self.traits.among(own, read_bytes[rows], made_bytes[rows])
        is_fused = traits.is_cheap | traits.is_expensive
        index = self.arrays.columns.index[self.rows][rows]
        inner = np.zeros(len(rows), np.int64)
        for at in np.flatnonzero(np.isin(index, list(self.inner_bytes))).tolist():
            inner[at] = self.inner_bytes[int(index[at])]
        barriers, columns = (self.passing_rows, self.of_barriers), self.arrays.columns
        more = (columns, self.rows, self.renames, barriers, self.value_of)
        more = read_besides(*more)
        own = place[self.reads.row]
        loops = self._rows_with_bodies()
        own[made_inside(self.operators, loops, self.reads.start)] = -1
        row = np.append(self.reads.row, more[:, 0])
        first = np.append(own, place[more[:, 0]])
        is_there = first >= 0
        at, reader = entries(first[is_there], parts[row[is_there]])
        read = np.append(self.read, more[:, 1])[is_there][at]
        row = self.result_row
        number = np.arange(len(row)) - np.searchsorted(row, row)  # of the row's results
        writer = place[np.append(row, self.passing_rows)]
        writer[: len(row)] += np.where(parts[row] > 1, number, 0)
        table.add(
            2 * rows + 1,
            operator=index,
            cheap=traits.is_cheap,
            expensive=traits.is_expensive,
            opens=traits.is_opening,
            streams=traits.streams,
            streamed=traits.is_streamed,
            absorbs=is_fused | traits.is_reducing,
            repeated=traits.repeated,
            torn=traits.torn,
            moves=traits.moves,
            inner=inner,
            reads=(reader, read),
            writes=(writer, np.concatenate([self.of_results, self.of_barriers])),
        )

    def _parts(self) -> np.ndarray:
        """[rows + 1] of how many nodes each is: one for each part that is cut."""
        parts = np.ones(self.count + 1, np.intp)
        cuts = self.arrays.columns.where(lambda op: op.kind in CUTTING)[self.rows]
        made = np.bincount(self.result_row, minlength=self.count)
        parts[:-1][cuts] = np.maximum(made[cuts], 1)
        return parts

    def _rows_with_bodies(self) -> list[int]:
        """Rows of which something inside is known to hold memory."""
        indices = self.arrays.columns.index[self.rows]
        return np.flatnonzero(np.isin(indices, list(self.inner_bytes))).tolist()

    def _kernels(
        self, nodes: Nodes, in_memory: InMemory, shared: Mapping[int, int]
    ) -> KernelColumns:
        """A kernel for each node that writes memory, or nothing at all."""
        writer = np.repeat(np.arange(len(nodes)), np.diff(nodes.write_start))
        is_written = in_memory.is_written[nodes.writes]
        written = np.bincount(writer[is_written], minlength=len(nodes))
        is_kernel = (written > 0) | (np.diff(nodes.write_start) == 0)
        place = in_post_order(nodes, self.arrays.graph.post_order, len(self.values))
        starts, reads = sources(nodes, in_memory, np.flatnonzero(is_kernel), place)
        carried = self._carries()
        operator = nodes.operator[is_kernel]
        besides = np.flatnonzero(np.isin(operator, list(shared)))
        more = [shared[index] for index in operator[besides].tolist()]
        reads = np.insert(reads, starts[besides + 1], more)
        starts = starts + np.searchsorted(besides, np.arange(len(starts)))
        return KernelColumns(
            operator,
            starts,
            reads,
            np.concatenate([[0], np.cumsum(written[is_kernel])]),
            nodes.writes[is_written],
            nodes.inner_bytes[is_kernel],
            (nodes.is_fusable & ~nodes.moves)[is_kernel],
            nodes.is_send[is_kernel],
            {
                k: carried[int(operator[k])]
                for k in np.flatnonzero(np.isin(operator, list(carried))).tolist()
            },
        )

    def _wide(self, nodes: Nodes, named: Mapping[int, int]) -> Nodes:
        """The nodes with wide copies of what CPUs do not compute as it is."""
        read = nodes, self.values, self.arrays.columns, named, self._read_again()
        found = with_wide_copies(*read, self._wide_inputs())
        self.values, self.flat, self.wide = found.values, found.flat, dict(found.of)
        return found.nodes

    def _read_again(self) -> dict[int, set[int]]:
        """By operator, the values that loops read in every iteration."""
        rows = self._rows_with_bodies()
        return by_loop(read_again, self.operators, rows, self.reads.start, self.read)

    def _wide_inputs(self) -> set[int]:
        """Inputs that are the same in all iterations."""
        if not self.block.index:
            return set()
        carried = {old for old, _ in self.border.replaced}
        outside = np.flatnonzero(self.is_outside_input).tolist()
        return {int(self.value_of[self.inputs[p]]) for p in outside if p not in carried}

    def _carries(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """By operator, what loops and scatters read and return in the same place."""
        scatters = self.arrays.columns.where(is_scatter)[self.rows]
        rows = [*self._rows_with_bodies(), *np.flatnonzero(scatters).tolist()]
        return by_loop(
            lambda op, read: carries(
                op, read, self.value_of[list(op.results)].tolist()
            ),
            *(self.operators, rows, self.reads.start, self.read),
        )
