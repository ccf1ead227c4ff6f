"""The systems that a table compares: which plans each may run on a row's GPUs.

A plan that was published is taken as it is; otherwise the fastest that fits is what the
system is predicted to reach, as its authors report the best they found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.published.machines import table_of
from benchmarks.published.published_plan import submesh
from benchmarks.published.seconds import System
from benchmarks.published.simulator import Outcome, Plan, best_plan
from benchmarks.published.table import Row
from benchmarks.published.wide_resnet import WideResnet
from benchmarks.published.work import Execution, Layout

COLUMNS = {
    "alpa": "alpa",
    "inter_only": "inter_only",
    "intra_only": "intra_only",
    "megatron": "megatron_v100",
    "deepspeed": "deepspeed",
    "pp_dp": "pp_dp",
}
MOST_TENSOR = 8  # of Megatron, whose groups stay inside a host
MOST_CHUNKS = 8  # of layers that a device of an interleaved pipeline has


def system_of(name: str, **changes: Any) -> System:
    """The system of that name in `systems.toml`."""
    table = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in table_of("systems")[name].items()
    }
    how = Execution(**table.pop("how", {}))
    return replace(System(how=how, **table), **changes)


def predict(column: str, row: Row) -> Outcome | None:
    """What a column's system is predicted to do; None if nothing fits.

    A published plan is judged as any other: None if it does not fit.
    """
    return best_plan(row.simulator, candidates(column, row))


def candidates(column: str, row: Row) -> Sequence[Plan]:
    """The plans of a column's system.

    Raises:
      ValueError: an unknown column.
    """
    if column not in COLUMNS:
        raise ValueError(
            f"a column of Tflop/s is one of {', '.join(COLUMNS)} with `_tflops` behind, "
            f"but got {column!r}."
        )
    system = system_of(COLUMNS[column])
    if column in row.plans:
        given = row.plans[column]
        shapes = [given.layouts]
        if row.model.experts:  # which dims its axes split is not told: experts
            shapes = [tuple(replace(x, data=x.size, tensor=1) for x in given.layouts)]
        if isinstance(row.model, WideResnet):
            shapes = list(_reshaped(given.layouts))
        if given.num_microbatches is None:
            plans = list(_with_microbatches(shapes, row, system))
        else:
            plans = [Plan(each, given.num_microbatches, system) for each in shapes]
        return [each for plan in plans for each in _with_chunks(plan, row)]
    if column == "inter_only":
        layouts = (Layout(1, 1, 1, 1),) * row.num_gpus
        return list(_with_microbatches([layouts], row, system))
    if column == "intra_only":
        layouts = [(layout,) for layout in layouts_of(row.num_gpus, row)]
        return list(_with_microbatches(layouts, row, system))
    if column == "deepspeed":
        shape = submesh(row.num_gpus, row.setting.devices_per_host)
        whole = Layout(*shape, row.num_gpus, 1)
        layouts = [(layout,) for layout in with_experts(whole, row)]
        return list(_with_microbatches(layouts, row, system))
    grid = _grid(row, has_tensor=column != "pp_dp")
    return list(_with_microbatches(grid, row, system))


def _with_chunks(plan: Plan, row: Row) -> list[Plan]:
    """The plan, or its interleaved forms where a table says that its pipelines are."""
    number, layers = len(plan.layouts), row.model.layers
    if not row.setting.is_interleaved or number == 1 or plan.num_microbatches % number:
        return [plan]
    counts = [n for n in range(2, MOST_CHUNKS + 1) if layers % (number * n) == 0]
    forms = [replace(plan, num_chunks=n) for n in counts]
    return forms or [plan]


def _reshaped(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, ...]]:
    """The same submeshes, of which the first split the batch, the others layers too.

    Activations shrink and weights grow from the first layer of a convolutional network
    to its last.
    """
    seen = set()
    for tensor in (1, 2, 4, 8):
        for first in range(len(layouts)):
            parts = [1] * first + [tensor] * (len(layouts) - first)
            found = tuple(
                replace(each, data=each.size // number, tensor=number)
                for each, part in zip(layouts, parts, strict=True)
                for number in (min(part, each.size),)
            )
            if found not in seen:
                seen.add(found)
                yield found


def layouts_of(number: int, row: Row) -> list[Layout]:
    """All (data, tensor) shapes of so many GPUs that could hold the row's model."""
    hosts, devices = submesh(number, row.setting.devices_per_host)
    tensors = [n for n in range(1, number + 1) if number % n == 0 and n & (n - 1) == 0]
    if row.model.experts:
        tensors = [1]
    found = [Layout(hosts, devices, number // n, n) for n in tensors]
    # Hosts are one axis of the mesh and their devices the other: either has experts.
    inside = [replace(x, inner=devices) for x in found if hosts > 1 and row.model.experts]
    return found + inside


def with_experts(layout: Layout, row: Row) -> list[Layout]:
    """Experts over so many neighbours as divide, or over all groups of the batch.

    Alpa's authors tried every such number with DeepSpeed (alpa-projects/alpa,
    benchmark/alpa/paper_manual_moe_suite.py, the last column) and reported the best.
    """
    number, most = layout.data, row.model.experts
    parts = [n for n in range(2, number) if number % n == 0 and most % n == 0]
    return [*(replace(layout, inner=n) for n in parts), layout]


def _grid(row: Row, *, has_tensor: bool = True) -> Iterator[tuple[Layout, ...]]:
    """Equal stages of (data, tensor) groups, as Megatron-LM is configured."""
    sizes = [n for n in range(1, row.num_gpus + 1) if row.num_gpus % n == 0]
    for data, tensor in product(sizes, sizes if has_tensor else [1]):
        number = data * tensor
        if row.num_gpus % number or tensor > MOST_TENSOR:
            continue
        hosts, devices = submesh(number, row.setting.devices_per_host)
        layout = Layout(hosts, devices, data, tensor)
        yield (layout,) * (row.num_gpus // number)


def _with_microbatches(
    layouts: Iterator[tuple[Layout, ...]] | Sequence[tuple[Layout, ...]],
    row: Row,
    system: System,
) -> Iterator[Plan]:
    """Each with every number of microbatches, the fewest first."""
    batch_size = row.batch_size
    counts = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    for each in layouts:
        for count in counts:
            yield Plan(each, count, system)
