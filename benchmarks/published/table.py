"""Reads a published table: its setting, its rows, and its plans.

The comment lines at the head of a file say what machine and sizes are meant; columns
say what a row's model is: `heads` makes it a GPT, `experts` a mixture of experts,
`channels` and `width_factor` a Wide-ResNet.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import gpt, moe, resnet
from benchmarks.published.resnet_units import resnet_units
from benchmarks.published.unit_costs import Layout
from benchmarks.published.unit_model import UnitModel, gpt_units, moe_units

_TFLOPS = "_tflops"
_BASELINE = ("megatron", "deepspeed")
_RESNET_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_OTHER_NAMES = {
    "base_channel": "channels",
    "base_channels": "channels",
    "width": "width_factor",
    "ppdp_tflops": "pp_dp_tflops",
}
_MEANT = {"pflop_per_iter": "1e15 flops of an iteration by which Tflop/s were counted"}
_LEFT_OUT = ("", "-", "n/a", "nan")  # cells of what was not measured
_OUT_OF_MEMORY = ("oom", "x", "×", "0", "0.0")
_WHOLE = re.compile(r"\d+(,\d{3})*(\.0+)?")
_MEASURED = re.compile(r"(.*\w)[\s_([]+tflop[s/].*")
_SUBMESH = re.compile(r"(?:(\d+)x)?\((\d+);(\d+)\)|(\d+)")


@dataclass(frozen=True)
class Setting:
    """What the head of a file says of all rows: machine, sequence, words, batch."""

    kind: str = "V100"
    memory_bytes: int = 16 * 2**30
    devices_per_host: int = 8
    seq_len: int = 1024
    vocab_size: int = 51200
    batch_size: int = 1024
    heads: int = 16
    mlp_ratio: int = 4
    group_size: int = 2048
    image_size: int = 224
    num_classes: int = 1024


@dataclass(frozen=True)
class PublishedPlan:
    """Stages as they were published: the layout of each, and the microbatches."""

    layouts: tuple[Layout, ...]
    num_microbatches: int


@dataclass(frozen=True)
class Cell:
    """A measured number, in Tflop/s a GPU; a starred one was projected by its authors.

    None: it ran out of memory.
    """

    column: str
    tflops: float | None
    is_projected: bool


@dataclass(frozen=True, eq=False)
class Row:
    """One model on one number of GPUs."""

    num_gpus: int
    model: UnitModel
    flops: float  # of an iteration
    batch_size: int
    plans: dict[str, PublishedPlan]  # by column, where it is known
    cells: tuple[Cell, ...]
    setting: Setting

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
    """The table of a CSV file with comment lines.

    Raises:
      ValueError: there is no such file, a column that is needed is missing, or an
        entry cannot be read.
    """
    if not path.is_file():
        raise ValueError(
            f"a published table must be a CSV file, but {path} is none; those of the "
            f"Alpa paper are read where no table is given."
        )
    lines = path.read_text("utf-8-sig").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    setting = _setting(" ".join(comments))
    baseline = _plans_in_comments(comments, setting)
    records = csv.DictReader(line for line in lines if not line.startswith("#"))
    try:
        rows = tuple(_row(_named(each), setting, baseline, path) for each in records)
    except KeyError as error:
        names = records.fieldnames or ()
        raise ValueError(_missing_text(str(error.args[0]), names, path)) from None
    if not rows:
        raise ValueError(f"a published table has rows, but {path} has none.")
    if not any(row.cells for row in rows):
        raise ValueError(
            f"a published table has columns of Tflop/s a GPU, whose names end in "
            f"{_TFLOPS!r}, but {path} has {', '.join(records.fieldnames or ())}."
        )
    return Table(path.stem, setting, rows)


def _setting(text: str) -> Setting:
    """Numbers that the head of a file names; what it leaves out is as in GPT's.

    Raises:
      ValueError: a machine that is not written as `8x V100-16GB`.
    """
    found = Setting()
    patterns = {
        "seq_len": r"\bseq(?:uence)?(?:[ _]len(?:gth)?)? (\d[\d,]*)",
        "vocab_size": r"\bvocab(?:ulary)?(?:[ _]size)? (\d[\d,]*)",
        "batch_size": r"\bbatch(?:[ _]size)? (\d[\d,]*)",
        "heads": r"\b(\d+) heads",
        "mlp_ratio": r"\bFFN (\d+)H",
        "group_size": r"\bgroup (\d+)",
        "image_size": r"\bimage (\d+)",
        "num_classes": r"\b(\d+) classes",
        "devices_per_host": r"\b(\d+)x [A-Z]\d+-\d+GB",
    }
    for name, pattern in patterns.items():
        match = re.search(pattern, text)
        if match:
            number = int(match.group(1).replace(",", ""))
            found = replace(found, **{name: number})
    device = re.search(r"\b\d+x ([A-Z]\d+)-(\d+)GB", text)
    other = re.search(r"\b(?:[AHVPBL]\d{1,3}|TPU)\b", text)
    if device is None and other is not None:
        raise ValueError(
            f"the head of a published table names its machine as '8x V100-16GB', the "
            f"devices of a host and the memory of each, but says {other.group()!r} "
            f"otherwise."
        )
    if device is None:
        return found
    memory_bytes = int(device.group(2)) * 2**30
    return replace(found, kind=device.group(1), memory_bytes=memory_bytes)


def _named(record: dict[str, str]) -> dict[str, str]:
    """A record with the names of columns that are used here.

    Raises:
      ValueError: it has more or fewer values than there are columns.
    """
    if None in record or None in record.values():
        raise ValueError(
            f"a row has a value for each column, but one does not: "
            f"{', '.join(str(value) for value in record.values())}."
        )
    names = {name: _column_name(name) for name in record}
    return {_OTHER_NAMES.get(names[name], names[name]): record[name] for name in record}


def _column_name(text: str) -> str:
    """`alpa_tflops` of `Alpa (TFLOPS/GPU)`, `intra_only_tflops` of `intra-only TFLOPS`.

    Other units than Tflop/s are left out.
    """
    name = text.strip().lower()
    measured = _MEASURED.fullmatch(name)
    name = measured.group(1) if measured else name.split("(")[0]
    name = "_".join(re.findall(r"\w+", name))
    return name + _TFLOPS if measured else name


def _row(
    record: dict[str, str],
    setting: Setting,
    baseline: dict[int, PublishedPlan],
    path: Path,
) -> Row:
    try:
        number, model = _whole(record, "gpus"), _model(record, setting)
        flops = _positive("pflop_per_iter", record["pflop_per_iter"]) * 1e15
        cells = tuple(
            _cell(name.removesuffix(_TFLOPS), text)
            for name, text in record.items()
            if name.endswith(_TFLOPS) and text.strip().lower() not in _LEFT_OUT
        )
        plans: dict[str, PublishedPlan] = {}
        if record.get("alpa_plan"):
            count = _whole(record, "alpa_microbatches")
            layouts = parse_layouts(record["alpa_plan"], setting.devices_per_host)
            plans["alpa"] = PublishedPlan(layouts, count)
        if number in baseline:
            plans.update({name: baseline[number] for name in _BASELINE})
        for column, plan in plans.items():
            _check_size(column, plan, number)
        batch_size = _batch_size(record, setting)
    except ValueError as error:
        which = ", ".join(record.values())
        raise ValueError(f"{error} It is in {path}, row {which}.") from None
    return Row(number, model, flops, batch_size, plans, cells, setting)


def _missing_text(column: str, names: Sequence[str], path: Path) -> str:
    meant = _MEANT.get(column)
    return (
        f"a row of {path} needs the column {column!r}{f' ({meant})' if meant else ''}, "
        f"but the columns, divided by commas, are {', '.join(names)}."
    )


def _whole(record: dict[str, str], column: str) -> int:
    text = record[column].strip()
    number = 0
    if _WHOLE.fullmatch(text):
        number = int(float(text.replace(",", "")))
    if not number:
        raise ValueError(f"`{column}` is a whole number above 0, but got {text!r}.")
    return number


def _positive(column: str, text: str) -> float:
    number = 0.0
    if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text.strip().lower()):
        number = float(text)
    if not number:
        raise ValueError(f"`{column}` is a number above 0, but got {text!r}.")
    return number


def _check_size(column: str, plan: PublishedPlan, num_gpus: int) -> None:
    """Raises ValueError unless the stages have all GPUs together."""
    size = sum(layout.size for layout in plan.layouts)
    if size != num_gpus:
        raise ValueError(
            f"the stages of a plan have all GPUs of a row, but those of {column} have "
            f"{size} of {num_gpus}."
        )


def _batch_size(record: dict[str, str], setting: Setting) -> int:
    """Examples of an iteration: what microbatches do not divide is left out, as the
    authors did (1,520 of 1,536 for 38: benchmark/alpa/suite_wresnet.py)."""
    batch_size = setting.batch_size
    if record.get("batch"):
        batch_size = _whole(record, "batch")
    count = _whole(record, "alpa_microbatches") if record.get("alpa_plan") else 1
    return batch_size - batch_size % count


def _cell(column: str, text: str) -> Cell:
    number = text.strip().lower()
    if number in _OUT_OF_MEMORY:
        return Cell(column, None, False)
    is_projected = number.endswith("*")
    tflops = _positive(column + _TFLOPS, number.removesuffix("*"))
    return Cell(column, tflops, is_projected)


def _model(record: dict[str, str], setting: Setting) -> UnitModel:
    layers = _whole(record, "layers")
    if "width_factor" in record:
        return _resnet(record, layers, setting)
    hidden = _whole(record, "hidden")
    sizes = setting.vocab_size, setting.seq_len, layers, hidden
    if "experts" in record:
        config = moe.Config(
            *(*sizes, setting.heads, setting.batch_size, _whole(record, "experts")),
            group_size=setting.group_size,
            mlp_ratio=setting.mlp_ratio,
        )
        return moe_units(config)
    heads = _whole(record, "heads")
    return gpt_units(
        gpt.Config(*sizes, heads, setting.batch_size, mlp_ratio=setting.mlp_ratio)
    )


def _resnet(record: dict[str, str], layers: int, setting: Setting) -> UnitModel:
    """Raises ValueError unless it has 50 or 101 layers."""
    if layers not in _RESNET_STAGES:
        known = " or ".join(map(str, _RESNET_STAGES))
        raise ValueError(f"a Wide-ResNet has {known} layers, but a row has {layers}.")
    return resnet_units(
        resnet.Config(
            *(_RESNET_STAGES[layers], _whole(record, "channels"), setting.image_size),
            *(setting.num_classes, setting.batch_size, "bottleneck"),
            width_factor=_whole(record, "width_factor"),
        )
    )


def parse_layouts(text: str, devices_per_host: int) -> tuple[Layout, ...]:
    """Stages as `4x(1;8) logical (2;4)` or `2+2+4 GPUs logical (2;1)(2;1)(4;1)`.

    Terms of both kinds may be added: `2x(1;4)+(1;8)`. Submeshes are (hosts;devices of
    each), logical shapes (data;tensor), which are those of the submesh where they are
    left out.

    Raises:
      ValueError: the text is neither, or shapes and submeshes differ in size.
    """
    physical, _, logical = text.partition("logical")
    shapes = [(int(a), int(b)) for a, b in re.findall(r"\((\d+);(\d+)\)", logical)]
    submeshes: list[tuple[int, int]] = []
    for term in physical.replace("GPUs", "").split("+"):
        found = _SUBMESH.fullmatch(term.strip())
        if found is None:
            raise ValueError(
                f"a plan is written as '4x(1;8) logical (2;4)' or '2+2+4 GPUs logical "
                f"(2;1)(2;1)(4;1)', but got {text!r}."
            )
        count, hosts, devices, number = found.groups()
        if number:
            submeshes.append(submesh(int(number), devices_per_host))
        else:
            submeshes += [(int(hosts), int(devices))] * int(count or 1)
    shapes = shapes or submeshes
    if len(shapes) == 1:
        shapes = shapes * len(submeshes)
    if len(shapes) != len(submeshes):
        raise ValueError(
            f"a plan has one logical shape, or one for each of its {len(submeshes)} "
            f"submeshes, but got {len(shapes)} in {text!r}."
        )
    layouts = []
    for (hosts, devices), (data, tensor) in zip(submeshes, shapes, strict=True):
        if hosts * devices != data * tensor:
            raise ValueError(
                f"a logical shape has as many devices as its submesh, but "
                f"({data};{tensor}) stands for ({hosts};{devices}) in {text!r}."
            )
        layouts.append(Layout(hosts, devices, data, tensor))
    return tuple(layouts)


def submesh(number: int, devices_per_host: int) -> tuple[int, int]:
    """The fewest hosts with equal parts of so many devices, and the part of each."""
    hosts = -(-number // devices_per_host)
    while number % hosts:
        hosts += 1
    return hosts, number // hosts


def _plans_in_comments(
    comments: Sequence[str], setting: Setting
) -> dict[int, PublishedPlan]:
    """Plans of the baseline by GPUs: `4 GPUs (2;1;2;128), 8 (1;1;8;128)`.

    Numbers are (data, tensor, stages, microbatches).
    """
    text = next((each for each in comments if "(dp,tp,pp,microbatches)" in each), "")
    found = {}
    pattern = r"(\d+)(?: GPUs)? \((\d+);(\d+);(\d+);(\d+)\)"
    for numbers in re.findall(pattern, text):
        gpus, data, tensor, stages, count = map(int, numbers)
        hosts, devices = submesh(data * tensor, setting.devices_per_host)
        layouts = (Layout(hosts, devices, data, tensor),) * stages
        found[gpus] = PublishedPlan(layouts, count)
    return found
