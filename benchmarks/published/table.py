"""Reads a published table: its setting, its rows, and its plans.

The comment lines at the head of a file say what machine and sizes are meant; columns
say what a row's model is: `heads` makes it a GPT, `experts` a mixture of experts,
`channels` and `width_factor` a Wide-ResNet. A column that has a name of the head's
setting (`seq_len`, `vocab_size`, `batch`, `mlp_ratio`) counts before it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from benchmarks.published.columns import (
    TFLOPS,
    Cell,
    cell_of,
    column_name,
    nearest,
    positive,
    whole,
)
from benchmarks.published.published_plan import (
    PublishedPlan,
    plans_in_comments,
    published_plan,
)
from benchmarks.published.setting import Setting, read_setting
from benchmarks.published.simulator import Simulator
from benchmarks.published.wide_resnet import WideResnet
from benchmarks.published.work import Execution, Layout, Transformer

_BASELINE = ("megatron", "deepspeed")
_PLAN_PARTS = ("plan", "microbatches", "microbatch_size", "dp", "tp", "pp")
_DEPTHS = (50, 101)
Model: TypeAlias = Transformer | WideResnet
_SIZES = {"batch": "batch_size", "seq_len": "", "vocab_size": "", "mlp_ratio": ""}
_ONE = Layout(1, 1, 1, 1)
_DELIMITERS = ",\t;|"


@dataclass(frozen=True, eq=False)
class Row:
    """One model on one number of GPUs."""

    num_gpus: int
    model: Model
    flops: float  # of an iteration
    batch_size: int
    plans: dict[str, PublishedPlan]  # by column, where it is known
    cells: tuple[Cell, ...]
    setting: Setting

    @property
    def simulator(self) -> Simulator:
        return Simulator(self.model, self.batch_size, self.setting.machine)

    def tflops(self, seconds: float) -> float:
        """Tflop/s a GPU of an iteration that takes so long."""
        return self.flops / seconds / self.num_gpus / 1e12


@dataclass(frozen=True, eq=False)
class Table:
    """A published table; `name` is its file's."""

    name: str
    setting: Setting
    rows: tuple[Row, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(cell.column for cell in self.rows[0].cells)


def read_table(path: Path) -> Table:
    """The table of a CSV file with comment lines; tabs, `;` and `|` divide it too.

    Raises:
      ValueError: there is no such file, a column that is needed is missing, or an
        entry cannot be read.
    """
    if not path.is_file():
        raise ValueError(
            f"a published table must be a CSV file, but {path} is none; those of the "
            f"Alpa paper are read where no table is given."
        )
    lines = [each for each in path.read_text("utf-8-sig").splitlines() if each.strip()]
    comments = [line for line in lines if line.startswith("#")]
    lines = [line for line in lines if not line.startswith("#")]
    setting = read_setting(" ".join(comments))
    baseline = plans_in_comments(comments, setting.devices_per_host)
    head = lines[0] if lines else ""
    delimiter = max(_DELIMITERS, key=head.count)
    records = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    names = list(records.fieldnames or ())
    try:
        found = [_named(each, setting) for each in records]
        rows = tuple(_row(each, setting, baseline, path) for each in found)
    except KeyError as error:
        raise ValueError(_missing_text(str(error.args[0]), names, path)) from None
    if not rows:
        raise ValueError(f"a published table has rows, but {path} has none.")
    if not any(row.cells for row in rows):
        raise ValueError(
            f"a published table has columns of Tflop/s a GPU, whose names end in "
            f"{TFLOPS!r}, but {path} has {', '.join(names)}."
        )
    return Table(path.stem, setting, rows)


def _named(record: dict[str, str], setting: Setting) -> dict[str, str]:
    """A record with the names of columns that are used here.

    A column of Tflop/s that names no system is that of the head's, else Megatron's if
    tensor or pipeline groups are given. Parts of a plan that name no system belong to
    the only column of Tflop/s.

    Raises:
      ValueError: it has more or fewer values than there are columns.
    """
    if None in record or None in record.values():
        raise ValueError(
            f"a row has a value for each column, but one does not: "
            f"{', '.join(str(value) for value in record.values())}."
        )
    found = {column_name(name): value for name, value in record.items() if name.strip()}
    if TFLOPS in found and (setting.system or {"tp", "pp"} & found.keys()):
        found[(setting.system or _BASELINE[0]) + TFLOPS] = found.pop(TFLOPS)
    systems = [name for name in found if name.endswith(TFLOPS)]
    if len(systems) == 1:
        system = systems[0].removesuffix(TFLOPS)
        for part in _PLAN_PARTS:
            if part in found:
                found.setdefault(f"{system}_{part}", found.pop(part))
    return found


def _row(
    record: dict[str, str],
    setting: Setting,
    baseline: dict[int, PublishedPlan],
    path: Path,
) -> Row:
    try:
        number = whole(record, "gpus")
        sizes = {
            field or column: whole(record, column)
            for column, field in _SIZES.items()
            if record.get(column, "").strip()
        }
        setting = replace(setting, **sizes)
        model = _model(record, setting)
        found = [
            cell_of(name, text)
            for name, text in record.items()
            if name.endswith(TFLOPS)
        ]
        cells = tuple(cell for cell in found if cell is not None)
        batch_size = _batch_size(record, setting)
        flops = _flops(record, model, replace(setting, batch_size=batch_size))
        plans = {name: baseline[number] for name in _BASELINE if number in baseline}
        for column in {name.removesuffix(TFLOPS) for name in record}:
            plan = published_plan(
                column, record, setting.devices_per_host, batch_size
            )
            if plan is not None:
                plans[column] = plan
    except ValueError as error:
        which = ", ".join(record.values())
        raise ValueError(f"{error} It is in {path}, row {which}.") from None
    return Row(number, model, flops, batch_size, plans, cells, setting)


def _flops(record: dict[str, str], model: Model, setting: Setting) -> float:
    """Of an iteration: as the table has them, else as the authors of the model count.

    GPT         96 B S L H^2 (1 + S / 6H) + 6 B S H V   (Narayanan et al. 2021, equation
                3): recomputation of layers is work too
    MoE         so, too (alpa-projects/alpa, benchmark/alpa/util.py: compute_moe_tflops)
    Wide-ResNet three times the products of a forward pass
    """
    text = record.get("pflop_per_iter")
    if text is not None:
        return positive("pflop_per_iter", text) * 1e15
    units = model.units(_ONE, setting.batch_size, Execution())
    flops = [sum(product.flops for product in unit.products) for unit in units]
    passes = 3 if isinstance(model, WideResnet) else 4
    once = 3 * flops[-1] - passes * flops[-1]  # the head is not made again
    return passes * sum(flops[unit] for unit in model.sequence) + once


def _missing_text(column: str, names: Sequence[str], path: Path) -> str:
    return (
        f"a row of {path} needs the column {column!r}, but the columns are "
        f"{', '.join(names)}{nearest(column, names)}."
    )


def _batch_size(record: dict[str, str], setting: Setting) -> int:
    """Examples of an iteration: what microbatches do not divide is left out, as the
    authors did (1,520 of 1,536 for 38: benchmark/alpa/suite_wresnet.py)."""
    column, count = "alpa_microbatches", 1
    if record.get("alpa_plan") and column in record:
        count = whole(record, column)
    return setting.batch_size - setting.batch_size % count


def _model(record: dict[str, str], setting: Setting) -> Model:
    """Raises ValueError if it is a Wide-ResNet of a number of layers that none has."""
    layers = whole(record, "layers")
    if "width_factor" in record:
        if layers not in _DEPTHS:
            known = " or ".join(map(str, _DEPTHS))
            raise ValueError(
                f"a Wide-ResNet has {known} layers, but a row has {layers}."
            )
        sizes = whole(record, "channels"), whole(record, "width_factor")
        return WideResnet(layers, *sizes, setting.image_size, setting.num_classes)
    hidden, has_experts = whole(record, "hidden"), "experts" in record
    heads = setting.heads
    if record.get("heads") or not has_experts:
        heads = whole(record, "heads")
    sizes = hidden, heads, setting.mlp_ratio * hidden
    dense = Transformer(
        *(layers, *sizes, setting.vocab_size, setting.seq_len), dtype="float16"
    )
    if not has_experts:
        return dense
    # Trained by Adafactor, whose factored moments are next to nothing (alpa-projects/
    # alpa: benchmark/alpa/benchmark_3d_one_case_moe.py).
    return replace(
        dense,
        experts=whole(record, "experts"),
        experts_every=2,
        group_size=setting.group_size,
        state_bytes=4,
    )
