"""Reads a table of Tflop/s a GPU, a row a model and a column a system.

The comment lines at the head of a file say what machine and sizes are meant; columns
say what a row's model is: `heads` makes it a GPT, `experts` a mixture of experts,
`channels` and `width_factor` a Wide-ResNet. A column that has a name of the head's
setting (`seq_len`, `vocab_size`, `batch`, `mlp_ratio`) counts before it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from autopar.clusters.cluster import Cluster
from benchmarks.published.columns import (
    TFLOPS,
    Cell,
    cell_of,
    column_name,
    nearest,
    positive,
    whole,
)
from benchmarks.published.machines import Machine, known_machine, table_of
from benchmarks.published.published_plan import (
    PublishedPlan,
    plans_in_comments,
    published_plan,
)
from benchmarks.published.simulator import Simulator
from benchmarks.published.wide_resnet import DEPTHS, WideResnet
from benchmarks.published.work import Execution, Layout, Transformer

_BASELINE = ("megatron", "deepspeed")
_PLAN_PARTS = ("plan", "microbatches", "microbatch_size", "dp", "tp", "pp")
_SIZES = {"batch": "batch_size", "seq_len": "", "vocab_size": "", "mlp_ratio": ""}
_DELIMITERS = ",\t;|"
_DEVICES = re.compile(
    r"\b(\d+)\s*x\s*(?:NVIDIA )?(?:TPU[ -]?)?([A-Za-z]+\d+[a-z]?)"
    r"(?:[- ](?:SXM\d?|PCIe))?(?:[- ](\d+) ?GB)?\b"
)
_NAMED = re.compile(r"\b(?:[AHVPBL]\d{2,3}|v\d[ep]|TPU)\b")
_BANDWIDTH = re.compile(
    r"\b(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(Gbps|Gb/s|Gbit/s|GB/s)\s+"
    r"(?:(?!NVLink)\w+ ){0,2}"
    r"(?:(?:between|across|per|a|each|of each) (?:host|node|machine|server)|network)"
)
_GIBIBYTE = 2**30
Model: TypeAlias = Transformer | WideResnet


@dataclass(frozen=True)
class Setting:
    """What the head of a file says of all rows; what it leaves out is as Alpa's GPTs.

    `kind` is the name of a preset. `host_bandwidth` is of all network cards of a host
    in bytes/s, the preset's where it is None. `system` is that of columns that name
    none; `is_interleaved` says that pipelines of published shapes are.
    """

    kind: str = "V100"
    memory_bytes: int = 16 * _GIBIBYTE
    devices_per_host: int = 8
    host_bandwidth: float | None = None
    seq_len: int = 1024
    vocab_size: int = 51200
    batch_size: int = 1024
    heads: int = 16
    mlp_ratio: int = 4
    group_size: int = 2048
    image_size: int = 224
    num_classes: int = 1024
    system: str = ""
    is_interleaved: bool = False

    @cached_property
    def machine(self) -> Machine:
        """The preset, with the head's memory and network, and what is known besides."""
        return known_machine(
            *(self.kind, self.devices_per_host, self.memory_bytes, self.host_bandwidth)
        )


def read_setting(text: str) -> Setting:
    """The setting that the comment lines of a table describe.

    A machine is the devices of a host and their kind: `8x V100-16GB`, `4x H100`,
    `4x TPU v5p`. Its network is `25 Gbps between hosts` or `8x 200 Gb/s between hosts`.

    Raises:
      ValueError: a machine that is not written so, or of a kind that has no preset.
    """
    found: dict[str, Any] = {"is_interleaved": "interleaved" in text.lower()}
    for name, pattern in table_of("columns")["head"].items():
        if match := re.search(pattern, text):
            found[name] = int(match.group(1).replace(",", ""))
    if system := re.search(r"\bsystem[ :=]+([\w-]+)", text):
        found["system"] = system.group(1).lower().replace("-", "_")
    if network := _BANDWIDTH.search(text):
        cards, number, unit = network.groups()
        bits = 1 if unit == "GB/s" else 8
        found["host_bandwidth"] = int(cards or 1) * float(number) * 1e9 / bits
    device, other = _DEVICES.search(text), _NAMED.search(text)
    if device is not None:
        count, kind, memory = device.groups()
        try:
            preset = Cluster.preset(f"{kind}-{memory}GB")
        except ValueError:  # no preset of that memory: its own
            preset = Cluster.preset(kind)
        size = int(memory) * _GIBIBYTE if memory else preset.device.memory_bytes
        found |= {"kind": preset.name, "memory_bytes": size}
        found["devices_per_host"] = int(count)
    elif other is not None:
        raise ValueError(
            f"the head of a published table names its machine as '8x V100-16GB', the "
            f"devices of a host and the memory of each, but says {other.group()!r} "
            f"otherwise."
        )
    return Setting(**found)


@dataclass(frozen=True, eq=False)
class Row:
    """One model on one number of GPUs; `flops` are of an iteration.

    `plans` are those that were published, by column.
    """

    num_gpus: int
    model: Model
    flops: float
    batch_size: int
    plans: dict[str, PublishedPlan]
    cells: tuple[Cell, ...]
    setting: Setting

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator(self.model, self.batch_size, self.setting.machine)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file with comment lines; tabs, `;` and `|` divide it too.

    Raises:
      ValueError: a column that is needed is missing, or an entry cannot be read.
    """
    lines = [each for each in path.read_text("utf-8-sig").splitlines() if each.strip()]
    comments = [line for line in lines if line.startswith("#")]
    lines = [line for line in lines if not line.startswith("#")]
    setting = read_setting(" ".join(comments))
    baseline = plans_in_comments(comments, setting.devices_per_host)
    head = lines[0] if lines else ""
    delimiter = max(_DELIMITERS, key=head.count)
    records = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    names = list(records.fieldnames or ())
    rows = []
    try:
        for record in records:
            rows.append(_row(_named(record, setting), setting, baseline))
    except KeyError as error:
        column = str(error.args[0])
        raise ValueError(
            f"a row of {path} needs the column {column!r}, but the columns are "
            f"{', '.join(names)}{nearest(column, names)}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{error} It is in {path}, row {len(rows) + 1}.") from None
    if not any(row.cells for row in rows):
        raise ValueError(
            f"a published table has columns of Tflop/s a GPU, whose names end in "
            f"{TFLOPS!r}, but {path} has {', '.join(names)}."
        )
    return rows


def _named(record: dict[str, str], setting: Setting) -> dict[str, str]:
    """A record with the names of columns that are used here.

    A column of Tflop/s that names no system is that of the head's, else Megatron's if
    tensor or pipeline groups are given. Parts of a plan that name no system belong to
    the only column of Tflop/s.
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
    for part in _PLAN_PARTS if len(systems) == 1 else ():
        if part in found:
            name = f"{systems[0].removesuffix(TFLOPS)}_{part}"
            found.setdefault(name, found.pop(part))
    return found


def _row(
    record: dict[str, str], setting: Setting, baseline: Mapping[int, PublishedPlan]
) -> Row:
    number = whole(record, "gpus")
    sizes = {
        field or column: whole(record, column)
        for column, field in _SIZES.items()
        if record.get(column, "").strip()
    }
    setting = replace(setting, **sizes)
    # What microbatches do not divide is left out, as the authors did (1,520 of 1,536
    # for 38: alpa-projects/alpa, benchmark/alpa/suite_wresnet.py).
    left_out = 0
    if record.get("alpa_plan") and "alpa_microbatches" in record:
        left_out = setting.batch_size % whole(record, "alpa_microbatches")
    setting = replace(setting, batch_size=setting.batch_size - left_out)
    cells = [
        cell_of(name, text) for name, text in record.items() if name.endswith(TFLOPS)
    ]
    model, size = _model(record, setting), setting.batch_size
    plans = {name: baseline[number] for name in _BASELINE if number in baseline}
    for column in {name.removesuffix(TFLOPS) for name in record}:
        plan = published_plan(column, record, setting.devices_per_host, size)
        plans |= {column: plan} if plan else {}
    found = tuple(cell for cell in cells if cell is not None)
    return Row(number, model, _flops(record, model, size), size, plans, found, setting)


def _flops(record: Mapping[str, str], model: Model, batch_size: int) -> float:
    """Of an iteration: as the table has them, else as the authors of the model count.

    GPT         96 B S L H^2 (1 + S / 6H) + 6 B S H V   (Narayanan et al. 2021, equation
                3): recomputation of layers is work too
    MoE         so, too (alpa-projects/alpa, benchmark/alpa/util.py: compute_moe_tflops)
    Wide-ResNet three times the products of a forward pass
    """
    text = record.get("pflop_per_iter")
    if text is not None:
        return positive("pflop_per_iter", text) * 1e15
    units = model.units(Layout(1, 1, 1, 1), batch_size, Execution())
    flops = [sum(product.flops for product in unit.products) for unit in units]
    passes = 3 if isinstance(model, WideResnet) else 4
    layers = sum(flops[unit] for unit in model.sequence[:-1])
    return passes * layers + 3 * flops[-1]  # the head is not made again


def _model(record: Mapping[str, str], setting: Setting) -> Model:
    """Raises ValueError if it is a Wide-ResNet of a number of layers that none has."""
    layers = whole(record, "layers")
    if "width_factor" in record:
        if layers not in DEPTHS:
            known = " or ".join(map(str, DEPTHS))
            raise ValueError(
                f"a Wide-ResNet has {known} layers, but a row has {layers}."
            )
        sizes = whole(record, "channels"), whole(record, "width_factor")
        return WideResnet(layers, *sizes, setting.image_size, setting.num_classes)
    hidden, has_experts = whole(record, "hidden"), "experts" in record
    heads = whole(record, "heads", default=setting.heads if has_experts else 0)
    sizes = layers, hidden, heads, setting.mlp_ratio * hidden
    dense = Transformer(*sizes, setting.vocab_size, setting.seq_len, dtype="float16")
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
