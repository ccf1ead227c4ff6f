"""The systems that a table compares: which plans each may run on a row's GPUs.

A plan that was published is taken as it is; otherwise the fastest that fits is what the
system is predicted to reach, as its authors report the best they found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.published.machines import table_of
from benchmarks.published.published_plan import equal_layouts, submesh
from benchmarks.published.seconds import System
from benchmarks.published.simulator import Plan
from benchmarks.published.table import Row
from benchmarks.published.wide_resnet import WideResnet
from benchmarks.published.work import Execution, Layout

COLUMNS = ("alpa", "inter_only", "intra_only", "megatron", "deepspeed", "pp_dp")
MOST_TENSOR = 8  # of Megatron, whose groups stay inside a host
MOST_CHUNKS = 8  # of layers that a device of an interleaved pipeline has


def system_of(name: str, **changes: Any) -> System:
    """The system of that name in `systems.toml`."""
    table: dict[str, Any] = {**table_of("systems")[name]}
    how = Execution(**table.pop("how", {}))
    return replace(System(how=how, **table), **changes)


def candidates(column: str, row: Row) -> Sequence[Plan]:
    """The plans of a column's system.

    Raises:
      ValueError: an unknown column.
    """
    if column not in COLUMNS:
        raise ValueError(
            f"a column of Tflop/s is one of {', '.join(COLUMNS)} with `_tflops` "
            f"behind, but got {column!r}."
        )
    system, given = system_of(column), row.plans.get(column)
    alpa = row.plans.get("alpa")
    sizes = {layout.size for layout in alpa.layouts} if alpa else set()
    same = {"inter_only": sizes == {1}, "intra_only": sizes == {row.num_gpus}}
    if same.get(column):  # what Alpa ran was such a plan, of published microbatches
        given = alpa
    shapes: Iterable[tuple[Layout, ...]]
    if given is not None:
        shapes = [given.layouts]
        if row.model.experts:  # what the axes split is not published: experts
            shapes = [tuple(replace(x, data=x.size, tensor=1) for x in given.layouts)]
        elif isinstance(row.model, WideResnet):
            shapes = _reshaped(given.layouts)
    elif column == "inter_only":
        shapes = [(Layout(1, 1, 1, 1),) * row.num_gpus]
    elif column == "intra_only":
        shapes = [(layout,) for layout in _layouts_of(row)]
    elif column == "deepspeed":
        shapes = [(layout,) for layout in _with_experts(row)]
    else:
        shapes = _grid(row, MOST_TENSOR if column != "pp_dp" else 1)
    counts: Sequence[int]
    if given is None or given.num_microbatches is None:
        size = row.batch_size
        counts = [n for n in range(1, size + 1) if size % n == 0]
    else:
        counts = [given.num_microbatches]
    return [
        plan
        for shape in shapes
        for count in counts
        for plan in _with_chunks(Plan(shape, count, system), row)
    ]


def _with_chunks(plan: Plan, row: Row) -> list[Plan]:
    """The plan, or its interleaved forms where a table says that its pipelines are."""
    number, layers = len(plan.layouts), row.model.layers
    if not row.setting.is_interleaved or number == 1 or plan.num_microbatches % number:
        return [plan]
    counts = [n for n in range(2, MOST_CHUNKS + 1) if layers % (number * n) == 0]
    return [replace(plan, num_chunks=n) for n in counts] or [plan]


def _reshaped(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, ...]]:
    """The same submeshes, of which the first split the batch, the others layers too.

    Activations shrink and weights grow from the first layer of a convolutional network
    to its last; only some stages of the authors' plans were told to split the batch
    (alpa-projects/alpa: benchmark/alpa/suite_wresnet.py).
    """
    seen = set()
    for tensor, first in product((1, 2, 4, 8), range(len(layouts))):
        parts = [1] * first + [tensor] * (len(layouts) - first)
        found = tuple(
            replace(each, data=each.size // number, tensor=number)
            for each, part in zip(layouts, parts, strict=True)
            for number in (min(part, each.size),)
        )
        if found not in seen:
            seen.add(found)
            yield found


def _layouts_of(row: Row) -> list[Layout]:
    """All (data, tensor) shapes of the GPUs; experts are over one axis of the mesh,
    which is all of them or the devices of a host."""
    number = row.num_gpus
    hosts, devices = submesh(number, row.setting.devices_per_host)
    if row.model.experts:
        whole = Layout(hosts, devices, number, 1)
        return [whole, replace(whole, inner=devices)] if hosts > 1 else [whole]
    tensors = [n for n in range(1, number + 1) if number % n == 0 and n & (n - 1) == 0]
    return [Layout(hosts, devices, number // n, n) for n in tensors]


def _with_experts(row: Row) -> list[Layout]:
    """The batch over all GPUs, experts over all or over so many neighbours as divide.

    Alpa's authors tried every such number (alpa-projects/alpa,
    benchmark/alpa/paper_manual_moe_suite.py, the last column) and reported the best.
    """
    number, most = row.num_gpus, row.model.experts
    whole = Layout(*submesh(number, row.setting.devices_per_host), number, 1)
    parts = [n for n in range(2, number) if number % n == 0 and most % n == 0]
    return [*(replace(whole, inner=n) for n in parts), whole]


def _grid(row: Row, most_tensor: int) -> Iterator[tuple[Layout, ...]]:
    """Equal stages of (data, tensor) groups, as Megatron-LM is configured."""
    number, per_host = row.num_gpus, row.setting.devices_per_host
    sizes = [n for n in range(1, number + 1) if number % n == 0]
    for data, tensor in product(sizes, sizes):
        if number % (data * tensor) == 0 and tensor <= most_tensor:
            yield equal_layouts(data, tensor, number // (data * tensor), per_host)
