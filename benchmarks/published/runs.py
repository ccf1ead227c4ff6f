"""Published runs beside their predictions: every row of every table is such runs.

Tables are read as they are: those of Tflop/s by system (`table.py`), and TorchTitan's,
Megatron-Bridge's and MaxText's, where a run is one distinct configuration.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.published.columns import positive, whole
from benchmarks.published.machines import machine_of, table_of
from benchmarks.published.published_plan import submesh
from benchmarks.published.simulator import Outcome, Plan, Simulator, best_plan
from benchmarks.published.systems import candidates, system_of
from benchmarks.published.table import read_rows
from benchmarks.published.work import Layout, Transformer

# What Megatron-Bridge recomputes is told in its recipes only: as little as fits.
_REMATS = ("none", "streams", "half", "full")


@dataclass(frozen=True, eq=False)
class Run:
    """What a table says that a configuration reached, and what is predicted.

    Attributes:
      kind: what its errors are told with: a system, or a machine and a precision.
      config: what was run, by column; blank where it was not published.
      group: what runs share that may be compared: model, machine, batch, precision.
      release: of its software, as published.
      published: in `unit`, of one device; None where it ran out of memory.
      work: of one device in a step, in that unit.
      plans: what its system may run, of which it runs the fastest that fits.
      reason: why it is not scored.
    """

    table: str
    kind: str
    config: Mapping[str, str]
    group: tuple[str, ...]
    release: str
    published: float | None
    unit: str
    work: float
    plans: Sequence[Plan]
    simulator: Simulator | None
    reason: str = ""

    @cached_property
    def outcome(self) -> Outcome | None:
        """None if nothing fits."""
        return best_plan(self.simulator, self.plans) if self.simulator else None

    @cached_property
    def predicted(self) -> float | None:
        return self.work / self.outcome.seconds if self.outcome else None

    @property
    def error(self) -> float:
        """Relative; 1 where only one of the two ran out of memory."""
        if self.published is None or self.predicted is None:
            return float(self.published is not self.predicted)
        return self.predicted / self.published - 1

    @property
    def name(self) -> str:
        """What is compared, and its configuration."""
        config = (f"{key} {value}" for key, value in self.config.items() if value)
        return f"{' '.join(self.group)}: {' '.join(config)}"

    @property
    def plan(self) -> str:
        return str(self.outcome.plan) if self.outcome else "nothing fits"


def error_of(runs: Iterable[Run]) -> float:
    """Mean absolute relative error."""
    return float(np.mean([abs(run.error) for run in runs]))


def constant_error(runs: Sequence[Run]) -> float:
    """The error of the best constant guess, which is one of the numbers themselves."""
    numbers = np.array([run.published for run in runs if run.published is not None])
    if not len(numbers):
        return 1.0
    missing = len(runs) - len(numbers)
    errors = abs(numbers[:, None] / numbers - 1).sum(axis=1) + missing
    return float(errors.min() / len(runs))


def read_runs(path: Path) -> list[Run]:
    """The runs of a table, whose columns say which it is.

    Raises:
      ValueError: there is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"a published table must be a CSV file, but {path} is none.")
    lines = [
        line for line in path.read_text().splitlines() if line[:1] not in ("", "#")
    ]
    records = list(csv.DictReader(lines))
    for sign, read in _READERS.items():
        if records and sign in records[0]:
            return _distinct(read(record) for record in records)
    return list(_table_runs(path))


def _table_runs(path: Path) -> Iterator[Run]:
    for row in read_rows(path):
        work = row.flops / row.num_gpus / 1e12
        for cell in row.cells:
            yield Run(
                *(path.stem, cell.column, {"system": cell.column}),
                *((path.stem, str(row.num_gpus)), "", cell.tflops, "Tflop/s", work),
                *(candidates(cell.column, row), row.simulator),
                "projected" if cell.is_projected else "",
            )


def _distinct(runs: Iterable[Run]) -> list[Run]:
    """One of each configuration: the first release, with the median of all."""
    found: dict[object, list[Run]] = {}
    for run in runs:
        found.setdefault((run.group, *run.config.items()), []).append(run)
    return [
        replace(same[0], published=median(run.published or 0.0 for run in same))
        for same in found.values()
    ]


def model_of(name: str, seq_len: int) -> Transformer | None:
    """The model that a table calls so; None if its sizes are not known."""
    for table in table_of("models").values():
        if name in table["names"]:
            given = {key: value for key, value in table.items() if key != "names"}
            return Transformer(**given, seq_len=seq_len)
    return None


def _placed(
    machine_name: str,
    model: Transformer | None,
    batch: int,
    plan: Plan,
    remats: Sequence[str] = (),
) -> dict[str, Any]:
    """Plans of a run and their simulator; none if its model or machine is not known.

    Hosts of the plan's layouts are left to the machine; `remats` are tried.
    """
    machine = machine_of(machine_name, sum(layout.size for layout in plan.layouts))
    if not model or not machine:
        return {"plans": (), "simulator": None}
    layouts = []
    for each in plan.layouts:
        hosts, devices = submesh(each.size, machine.devices_per_host)
        layouts.append(replace(each, hosts=hosts, devices=devices))
    systems = [
        replace(plan.system, remat=remat) for remat in remats or (plan.system.remat,)
    ]
    plans = [replace(plan, layouts=tuple(layouts), system=each) for each in systems]
    return {"plans": plans, "simulator": Simulator(model, batch, machine)}


def _torchtitan(record: Mapping[str, str]) -> Run:
    data, tensor, context, stages, local, number, seq_len, batch = (
        whole(record, key)
        for key in "fsdp tp cp pp local_batch gpus seq_len batch".split()
    )
    is_compiled, precision = record["compile"] == "yes", record["precision"]
    remat = {"full": "full", "none": "none"}.get(record["ac"], "half")
    system = system_of("torchtitan", remat=remat)
    if not is_compiled:  # every operator of a norm is a kernel
        system = replace(system, how=replace(system.how, norm_passes=6.0))
    # Its authors report 29% of the forward pass and 8% of the step ("Introducing Async
    # Tensor Parallelism in PyTorch", 2024): it is next to nothing backward.
    if record["async_tp"] == "yes":
        system = replace(system, decomposes=("forward",))
    layout = Layout(1, data * tensor * context, data, tensor, context=context)
    dtype = "bfloat16" if precision == "bf16" else "float8"
    count = local if stages > 1 else 1
    plan = Plan((layout,) * stages, count, system, dtype=dtype)
    columns = "seq_len fsdp tp pp cp schedule local_batch compile async_tp ac"
    return Run(
        *("torchtitan", f"{record['gpu']} {precision}"),
        {key: record[key] for key in columns.split()},
        tuple(record[key] for key in ("model", "gpu", "gpus", "batch", "precision")),
        *("", positive("tokens_per_s_per_gpu", record["tokens_per_s_per_gpu"])),
        *("tokens/s", batch * seq_len / number),
        **_placed(record["gpu"], model_of(record["model"], seq_len), batch, plan),
        reason="" if is_compiled else "not compiled",
    )


def _megatron_bridge(record: Mapping[str, str]) -> Run:
    size, tensor, stages, context, chunks, experts, number, seq_len, batch = (
        whole(record, key, default=1)
        for key in "microbatch_size tp pp cp vp ep gpus seq_len batch".split()
    )
    gathered, group = int(record["fsdp"] or 0), tensor * context
    data = max(number // (group * stages), 1)
    kind = "bf16" if record["precision"] == "BF16" else "fp8"
    inner = min(gathered or experts, data)
    layout = Layout(1, data * group, data, tensor, inner, context)
    plan = Plan(
        *((layout,) * stages, max(batch // (size * data), 1)),
        system_of("megatron_bridge", gathers=gathered > 1),
        chunks if stages > 1 else 1,
        "bfloat16" if kind == "bf16" else "float8",
    )
    is_known = record["mode"] == "Pre-Training"
    model = model_of(record["model"], seq_len) if is_known else None
    columns = "microbatch_size seq_len fsdp tp pp cp vp ep"
    group_columns = "mode model note system gpus batch precision"
    return Run(
        *("megatron_bridge", f"{record['system']} {kind}"),
        {key: record[key] for key in columns.split()},
        tuple(record[key] for key in group_columns.split()),
        record["container"],
        positive("tokens_per_s_per_gpu", record["tokens_per_s_per_gpu"]),
        *("tokens/s", batch * seq_len / number),
        **_placed(record["system"], model, batch, plan, _REMATS),
        reason="not compiled" if is_known else record["mode"],
    )


def _maxtext(record: Mapping[str, str]) -> Run:
    layers, hidden, heads, mlp, words, seq_len, head_dim, inside, tensor, slices = (
        whole(record, key)
        for key in "layers emb_dim heads mlp_dim vocab seq_len head_dim "
        "chips_per_slice tensor_parallel slices".split()
    )
    sizes = layers, hidden, heads, mlp, words, seq_len
    model = Transformer(*sizes, head_dim=head_dim, is_gated=True)
    number = slices * inside
    batch = whole(record, "batch_per_chip") * number
    remat = "streams" if record["remat"].startswith("minimal") else "full"
    layout = Layout(1, number, number // tensor, tensor, inside // tensor)
    plan = Plan((layout,), 1, system_of("maxtext", remat=remat), dtype="bfloat16")
    # As published: scores that a causal mask hides are counted, too.
    params = layers * hidden * (4 * model.width + 3 * mlp) + hidden * words
    counted = params + 2 * layers * seq_len * model.width
    columns = "slices batch_per_chip tensor_parallel remat"
    return Run(
        *("maxtext", record["chip"]),
        {key: record[key] for key in columns.split()},
        tuple(record[key] for key in ("model", "chip", "slices", "batch_per_chip")),
        *("", positive("tflops_per_chip", record["tflops_per_chip"]), "Tflop/s"),
        6 * batch / number * seq_len * counted / 1e12,
        **_placed(record["chip"], model, batch, plan),
    )


_READERS: Mapping[str, Callable[[Mapping[str, str]], Run]] = {
    "async_tp": _torchtitan,
    "container": _megatron_bridge,
    "chips_per_slice": _maxtext,
}
