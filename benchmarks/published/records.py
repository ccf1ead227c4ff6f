"""Published runs of decoders as rows of a table: TorchTitan, Megatron-Bridge, MaxText.

Each reader takes its file as it is. A *run* is one distinct configuration, predicted in
the unit of its table; what no compiler of its framework made is told and not scored.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.published.columns import positive, whole
from benchmarks.published.machines import machine_of, table_of
from benchmarks.published.published_plan import submesh
from benchmarks.published.seconds import System
from benchmarks.published.simulator import Outcome, Plan, Simulator
from benchmarks.published.systems import system_of
from benchmarks.published.work import Layout, Transformer

_DTYPES = {"bf16": "bfloat16", "": "bfloat16"}


@dataclass(frozen=True, eq=False)
class Run:
    """One configuration and what it reached; `reason` says why it is not scored.

    Attributes:
      config: what was run, by column; blank where it was not published.
      group: runs of one table that may be compared: model, machine, batch, precision.
      release: of its software, as published.
      published: in `unit`, of one device.
      work: of one device in a step, in that unit.
    """

    table: str
    kind: str
    config: Mapping[str, str]
    group: tuple[str, ...]
    release: str
    published: float
    unit: str
    work: float
    plan: Plan | None
    simulator: Simulator | None
    reason: str = ""
    remats: tuple[str, ...] = ()

    @cached_property
    def outcome(self) -> Outcome | None:
        """As planned, or with the least recomputation that fits if none was told."""
        found = None
        if self.plan is None or self.simulator is None:
            return None
        for remat in self.remats or (self.plan.system.remat,):
            system = replace(self.plan.system, remat=remat)
            found = self.simulator.run(replace(self.plan, system=system))
            if found is None or found.is_feasible:
                break
        return found

    @property
    def predicted(self) -> float | None:
        """In the unit of the table; None if it cannot be run."""
        return self.work / self.outcome.seconds if self.outcome else None

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1 if self.predicted else 1.0


def read_runs(path: Path) -> list[Run]:
    """The runs of one of the tables, which its columns tell apart.

    Raises:
      ValueError: it is none of them.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    records = list(csv.DictReader(line for line in lines if line[0] != "#"))
    names = set(records[0]) if records else set()
    for sign, read in _READERS.items():
        if sign in names:
            return _distinct([read(record) for record in records])
    raise ValueError(
        f"a table of runs has one of the columns {', '.join(_READERS)}, but {path} has "
        f"{', '.join(sorted(names))}."
    )


def is_table_of_runs(path: Path) -> bool:
    return any(f",{sign}," in path.read_text() for sign in _READERS)


def _distinct(runs: Iterable[Run]) -> list[Run]:
    """One of each configuration, whose releases are told by the first; the median."""
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        found.setdefault((run.group, *run.config.items()), []).append(run)
    return [
        replace(same[0], published=median(each.published for each in same))
        for same in found.values()
    ]


def model_of(name: str, **sizes: Any) -> Transformer | None:
    """The model that a table calls so; None if its sizes are not known."""
    for table in table_of("models").values():
        if name in table["names"]:
            given = {key: value for key, value in table.items() if key != "names"}
            return Transformer(**given | sizes)
    return None


def _plan(
    degrees: Mapping[str, int], per_host: int, count: int, system: System, dtype: str
) -> Plan:
    """Equal stages of `data`, `tensor`, `context` groups, `inner` of the data."""
    chunks = degrees.get("chunks", 1)
    data, tensor, context = (degrees[key] for key in ("data", "tensor", "context"))
    hosts, devices = submesh(data * tensor * context, per_host)
    inner = degrees.get("inner", 0) or 0
    layout = Layout(hosts, devices, data, tensor, inner, context)
    stages = degrees.get("stages", 1)
    chunks = chunks if stages > 1 else 1
    return Plan((layout,) * stages, count, system, chunks, dtype)


def _torchtitan(record: Mapping[str, str]) -> Run:
    number, name = whole(record, "gpus"), record["gpu"]
    sizes = {"seq_len": whole(record, "seq_len")}
    model, machine = model_of(record["model"], **sizes), machine_of(name, number)
    remat = {"full": "full", "none": "none"}.get(record["ac"], "half")
    system = system_of("torchtitan", remat=remat)
    is_compiled = record["compile"] == "yes"
    if not is_compiled:
        system = replace(system, how=replace(system.how, norm_passes=6.0))
    if record["async_tp"] == "yes":
        system = replace(system, decomposes=("forward",))
    batch, stages = whole(record, "batch"), whole(record, "pp")
    degrees = {
        "data": whole(record, "fsdp"),
        "tensor": whole(record, "tp"),
        "context": whole(record, "cp"),
        "stages": stages,
    }
    count = whole(record, "local_batch") if stages > 1 else 1
    dtype = _DTYPES.get(record["precision"], record["precision"])
    plan = machine and _plan(degrees, machine.devices_per_host, count, system, dtype)
    simulator = model and machine and Simulator(model, batch, machine)
    keys = "seq_len fsdp tp pp cp schedule local_batch compile async_tp ac".split()
    return Run(
        *("torchtitan", f"{name} {record['precision']}"),
        {key: record[key] for key in keys},
        (record["model"], name, record["gpus"], record["batch"], record["precision"]),
        *("", positive("tokens_per_s_per_gpu", record["tokens_per_s_per_gpu"])),
        *("tokens/s", batch * sizes["seq_len"] / number, plan, simulator),
        "" if is_compiled else "not compiled",
    )


def _megatron(record: Mapping[str, str]) -> Run:
    number, name = whole(record, "gpus"), record["system"]
    given = {
        key: int(record[key]) if record[key].strip() else 0
        for key in "microbatch_size fsdp tp pp cp vp ep".split()
    }
    sizes = {"seq_len": whole(record, "seq_len")}
    model, machine = model_of(record["model"], **sizes), machine_of(name, number)
    data = number // (given["tp"] * given["pp"] * given["cp"])
    batch = whole(record, "batch")
    precision = record["precision"].split("-")[0]
    dtype = "bfloat16" if precision == "BF16" else "float8"
    is_gathered = given["fsdp"] > 1
    system = system_of("megatron", gathers=is_gathered)
    degrees = {
        "data": data,
        "tensor": given["tp"],
        "context": given["cp"],
        "stages": given["pp"],
        "inner": given["fsdp"] if is_gathered else min(given["ep"], data),
        "chunks": max(given["vp"], 1),
    }
    plan = simulator = None
    if model and machine and record["mode"] == "Pre-Training" and data:
        count = batch // (given["microbatch_size"] * data)
        if is_gathered:
            degrees["inner"] = min(given["fsdp"], data)
        plan = _plan(degrees, machine.devices_per_host, count, system, dtype)
        simulator = Simulator(model, batch, machine)
    keys = "microbatch_size seq_len fsdp tp pp cp vp ep".split()
    return Run(
        *("megatron_bridge", f"{name} {'bf16' if precision == 'BF16' else 'fp8'}"),
        {key: record[key] for key in keys},
        *(
            (record["mode"], record["model"], name, record["gpus"], record["batch"])
            + (record["precision"], record["note"]),
            record["container"],
        ),
        positive("tokens_per_s_per_gpu", record["tokens_per_s_per_gpu"]),
        *("tokens/s", batch * sizes["seq_len"] / number, plan, simulator),
        *("not compiled", ("none", "streams", "half", "full")),
    )


def _maxtext(record: Mapping[str, str]) -> Run:
    slices, inside = whole(record, "slices"), whole(record, "chips_per_slice")
    number, name = slices * inside, record["chip"]
    size = {
        key: whole(record, key)
        for key in "layers emb_dim heads head_dim mlp_dim seq_len vocab".split()
    }
    model = Transformer(
        *(size["layers"], size["emb_dim"], size["heads"], size["mlp_dim"]),
        *(size["vocab"], size["seq_len"]),
        head_dim=size["head_dim"],
        is_gated=True,
    )
    machine, tensor = machine_of(name, number), whole(record, "tensor_parallel")
    remat = "streams" if record["remat"].startswith("minimal") else "full"
    system = system_of("maxtext", remat=remat)
    degrees = {"data": number // tensor, "tensor": tensor, "context": 1}
    degrees["inner"] = inside // tensor
    batch = int(whole(record, "batch_per_chip") * number)
    plan = machine and _plan(degrees, machine.devices_per_host, 1, system, "bfloat16")
    params = size["layers"] * (
        4 * size["emb_dim"] * model.width + 3 * size["emb_dim"] * size["mlp_dim"]
    )
    params += size["emb_dim"] * size["vocab"]
    scores = 2 * size["layers"] * size["seq_len"] * model.width  # masked ones, too
    tokens = batch * size["seq_len"] / number
    work = 6 * tokens * (params + scores) / 1e12
    keys = "batch_per_chip tensor_parallel remat".split()
    return Run(
        *("maxtext", name),
        {"slices": record["slices"], **{key: record[key] for key in keys}},
        (record["model"], name, record["slices"], str(batch), "bf16"),
        *("", positive("tflops_per_chip", record["tflops_per_chip"]), "Tflop/s"),
        *(work, plan, machine and Simulator(model, batch, machine)),
    )


_READERS: dict[str, Callable[[Mapping[str, str]], Run]] = {
    "async_tp": _torchtitan,
    "container": _megatron,
    "chips_per_slice": _maxtext,
}
