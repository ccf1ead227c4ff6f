"""Plans as JSON: versioned, data only, made to be read, compared and edited by hand.

A plan of a pipeline holds that of each stage program in the form of a plan of one. One
line for each input, operator, tensor and collective. A spec is the dims that mesh
axes split and the reductions they owe, `data:0 model:sum`; an axis that is not named
holds replicas, and `-` says that all do. Seconds are of one step, bytes of one device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from textwrap import indent
from typing import Any, get_args

from ..graph.op_graph import MemoryKind, Role
from ..option_values import MicrobatchSemantics, Remat
from ..sharding.collective import KINDS, Collective
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec, is_legal, is_pending
from .plan import (
    Conversion,
    InputPlan,
    OperatorPlan,
    Padding,
    Prediction,
    ShardingPlan,
    TaskKind,
    TensorPlan,
)
from .plan_check import check_against as check_against
from .plan_view import Decision
from .record import Fields, Record, number_to_json, read_json
from .spec_text import SpecText
from .staged_plan import PlannedTransfer, StagedPlan, StageProgramPlan

FORMAT = "autopar-plan"
STAGED_FORMAT = "autopar-pipeline-plan"
VERSION = 1

_OPTIONAL = ("remat", "device_kind", "padding")
_COUNTS = ("collective_bytes", "peak_bytes", "budget_bytes", "host_bytes")
_LATER = ("host_seconds", "host_bytes")  # not in files of earlier versions
_STAGED_TEXTS = ("function", "cluster", "schedule", "microbatch_semantics")
_STAGED_COUNTS = ("num_stages", "num_microbatches")
_PRODUCTS = "stage_products"  # not in files of earlier versions
_FREE_GAP = "free_gap"  # in earlier files, where a budget bound


def to_json(plan: Decision) -> str:
    """The plan as a JSON document; `read_plan` gives an equal plan back."""
    if isinstance(plan, ShardingPlan):
        document = {"format": FORMAT, "version": VERSION, **plan_to_json(plan)}
        return f"{lines_of(document)}\n"
    document = {
        "format": STAGED_FORMAT,
        "version": VERSION,
        **{name: getattr(plan, name) for name in (*_STAGED_TEXTS, *_STAGED_COUNTS)},
        "predicted": prediction_to_json(plan.predicted),
        "meshes": [mesh_to_json(mesh) for mesh in plan.meshes],
        "transfers": [vars(each) for each in plan.transfers],
        "rows": list(plan.rows),
        "peak_bytes": list(plan.peak_bytes),
        **({_PRODUCTS: list(plan.stage_products)} if plan.stage_products else {}),
    }
    programs = ",\n".join(
        indent(
            lines_of({"stage": e.stage, "kind": e.kind, **plan_to_json(e.sharding)}),
            "    ",
        )
        for e in plan.programs
    )
    head = lines_of(document).removesuffix("\n}")
    return f'{head},\n  "programs": [\n{programs}\n  ]\n}}\n'


def plan_to_json(plan: ShardingPlan) -> dict[str, Any]:
    """The plan as JSON values."""
    text = SpecText(plan.mesh)
    texts = {name: getattr(plan, name) for name in _OPTIONAL if getattr(plan, name)}
    return {
        "function": plan.function,
        "mesh": mesh_to_json(plan.mesh),
        "cluster": plan.cluster,
        **texts,
        "predicted": prediction_to_json(plan.predicted),
        "inputs": [_input_to_json(each, text) for each in plan.inputs],
        "operators": [_operator_to_json(each, text) for each in plan.operators],
        "tensors": [_tensor_to_json(each, text) for each in plan.tensors],
        "outputs": [text.write_all(specs) for specs in plan.outputs],
        "trip_counts": list(plan.trip_counts),
        "collectives": [_collective_to_json(each, text) for each in plan.collectives],
    }


def read_plan(text: str, where: str) -> Decision:
    """The plan that `to_json` wrote.

    Args:
      text: the document.
      where: what errors call it, such as the file's path.

    Raises:
      PlanFileError: no plan, truncated, of another version, or a field that makes no
        sense; names `where`, the field and the reason.
    """
    root = read_json(text, where)
    members = root.value if isinstance(root.value, dict) else {}
    if members.get("format") not in (FORMAT, STAGED_FORMAT):
        Record(where, "format", None).fail(
            f"must be {FORMAT!r}, so this is no plan; write one with plan.save(path)"
        )
    version = members.get("version")
    if version != VERSION:
        Record(where, "version", None).fail(
            f"must be {VERSION}, the version that this autopar reads, but got {version}"
        )
    if members["format"] == FORMAT:
        return plan_from_json(root, ["format", "version"])
    return _staged_from_json(root)


def from_json(text: str, where: str) -> ShardingPlan:
    """As `read_plan`, of one program."""
    found = read_plan(text, where)
    if not isinstance(found, ShardingPlan):
        Record(where, "format", None).fail(f"must be {FORMAT!r}, of one program")
    return found


def _staged_from_json(root: Record) -> StagedPlan:
    names = ["format", "version", "predicted", "meshes", "transfers", "rows"]
    names += ["peak_bytes", "programs", *_STAGED_TEXTS, *_STAGED_COUNTS]
    top = root.fields(names, [_PRODUCTS])
    num_stages = top["num_stages"].integer(least=2)
    meshes = tuple(map(mesh_from_json, top["meshes"].items()))
    if not meshes or num_stages % len(meshes):
        top["meshes"].fail(
            f"must have a mesh for each of {num_stages} stages, or divide them, but "
            f"has {len(meshes)}"
        )
    semantics: Any = top["microbatch_semantics"].text(get_args(MicrobatchSemantics))
    return StagedPlan(
        function=top["function"].text(),
        cluster=top["cluster"].text(),
        num_stages=num_stages,
        num_microbatches=top["num_microbatches"].integer(least=1),
        schedule=top["schedule"].text(),
        microbatch_semantics=semantics,
        meshes=meshes,
        programs=tuple(_program(p, num_stages) for p in top["programs"].items()),
        transfers=tuple(_transfer(t, num_stages) for t in top["transfers"].items()),
        rows=tuple(item.text() for item in top["rows"].items()),
        peak_bytes=top["peak_bytes"].integers(),
        predicted=prediction_from_json(top["predicted"]),
        stage_products=top[_PRODUCTS].integers() if _PRODUCTS in top else (),
    )


def _program(record: Record, num_stages: int) -> StageProgramPlan:
    plan = plan_from_json(record, ["stage", "kind"])
    own = Fields(record.where, f"{record.field}.", record.value)
    kind: Any = own["kind"].text(get_args(TaskKind))
    return StageProgramPlan(own["stage"].integer(below=num_stages), kind, plan)


def _transfer(record: Record, num_stages: int) -> PlannedTransfer:
    found = record.fields(["slot", "source", "target", "bytes", "count"])
    return PlannedTransfer(
        found["slot"].text(),
        found["source"].integer(below=num_stages),
        found["target"].integer(below=num_stages),
        found["bytes"].integer(),
        found["count"].integer(least=1),
    )


def plan_from_json(record: Record, others: Sequence[str] = ()) -> ShardingPlan:
    """The plan that `plan_to_json` wrote, in an object with `others` besides."""
    written = (f.name for f in fields(ShardingPlan) if f.compare)
    names = [name for name in written if name not in _OPTIONAL]
    top = record.fields([*others, *names], _OPTIONAL)
    read = _Reader(mesh_from_json(top["mesh"]))
    num_blocks = len(top["trip_counts"].integers())
    outputs = tuple(read.specs(specs) for specs in top["outputs"].items())
    if len(outputs) != num_blocks:
        top["outputs"].fail(
            f"must have one list for each of {num_blocks} trip counts, "
            f"but got {len(outputs)}"
        )
    return ShardingPlan(
        function=top["function"].text(),
        mesh=read.mesh,
        cluster=top["cluster"].text(),
        inputs=tuple(map(read.input, top["inputs"].items())),
        operators=tuple(map(read.operator, top["operators"].items())),
        tensors=tuple(read.tensor(t, num_blocks) for t in top["tensors"].items()),
        outputs=outputs,
        trip_counts=top["trip_counts"].integers(),
        collectives=tuple(map(read.collective, top["collectives"].items())),
        predicted=prediction_from_json(top["predicted"]),
        remat=_remat_from_json(top["remat"]) if "remat" in top else "",
        device_kind=top["device_kind"].text() if "device_kind" in top else "",
        padding=_padding_from_json(top["padding"]) if "padding" in top else (),
    )


def _padding_from_json(record: Record) -> Padding:
    """Pairs of sizes, and of what they are padded to."""
    pairs = [(each, each.integers(least=1)) for each in record.items()]
    for each, sizes in pairs:
        if len(sizes) != 2 or sizes[0] >= sizes[1]:
            each.fail(f"must be a size and a larger one, but got {list(sizes)}")
    return tuple((size, padded) for _, (size, padded) in pairs)


def _remat_from_json(record: Record) -> str:
    """A `Remat` as it prints."""
    try:
        return str(Remat.parse(record.text()))
    except ValueError as error:
        record.fail(f"says nothing: {error}")


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of a plan on one mesh."""

    mesh: MeshShape

    @cached_property
    def text(self) -> SpecText:
        return SpecText(self.mesh)

    def specs(self, record: Record) -> tuple[Spec, ...]:
        return tuple(self.text.read(item) for item in record.items())

    def legal_spec(self, record: Record, shape: Sequence[int]) -> Spec:
        spec = self.text.read(record)
        if not is_legal(shape, spec, self.mesh.axis_sizes):
            record.fail(
                f"cannot split the shape {list(shape)} evenly on the mesh {self.mesh}, "
                f"but got {record.value!r}"
            )
        return spec

    def input(self, record: Record) -> InputPlan:
        names = ["path", "role", "spec", "shape", "bytes"]
        found = record.fields(names, ["memory"])
        shape = found["shape"].integers()
        spec = self.legal_spec(found["spec"], shape)
        role: Any = found["role"].text(get_args(Role))
        if is_pending(spec) and role != "sum":
            found["spec"].fail("must owe no reduction, as an argument is complete")
        bytes_ = found["bytes"].integer()
        memory: Any = "device"
        if "memory" in found:
            memory = found["memory"].text(get_args(MemoryKind))
        return InputPlan(found["path"].text(), role, spec, shape, bytes_, memory)

    def operator(self, record: Record) -> OperatorPlan:
        names = ["name", "kind", "source", "factors", "operands", "results"]
        found = record.fields([*names, "flops", "split", "seconds"])
        factors = tuple(item.text() for item in found["factors"].items())
        if factors and len(factors) != self.mesh.num_axes:
            found["factors"].fail(
                f"must name one factor for each axis of {self.mesh}, or none, "
                f"but got {len(factors)}"
            )
        return OperatorPlan(
            found["name"].text(),
            found["kind"].text(),
            found["source"].text(),
            factors,
            self.specs(found["operands"]),
            self.specs(found["results"]),
            found["flops"].number(),
            found["split"].integer(least=1),
            found["seconds"].number(),
        )

    def tensor(self, record: Record, num_blocks: int) -> TensorPlan:
        names = ["name", "shape", "dtype", "block", "spec"]
        found = record.fields(names, ["copies"])
        shape = found["shape"].integers()
        spec = self.legal_spec(found["spec"], shape)
        conversions = []
        made = {spec}
        for copy in found["copies"].items() if "copies" in found else ():
            pair = copy.fields(["from", "to"])
            source = self.legal_spec(pair["from"], shape)
            target = self.legal_spec(pair["to"], shape)
            if source not in made:
                pair["from"].fail("must be a spec that the tensor has by then")
            if target in made:
                pair["to"].fail("must be a spec the tensor does not have yet")
            made.add(target)
            conversions.append(Conversion(source, target))
        return TensorPlan(
            found["name"].text(),
            shape,
            found["dtype"].text(),
            found["block"].integer(below=num_blocks),
            spec,
            tuple(conversions),
        )

    def collective(self, record: Record) -> Collective:
        names = ["kind", "over", "dtype", "bytes", "count"]
        found = record.fields(
            names, ["reduction", "source", "conditional", "unbounded"]
        )
        kind = found["kind"].text(KINDS)
        groups = self.text.read_groups(found["over"], kind)
        if kind == "collective_permute" and any(len(pair) != 2 for pair in groups):
            found["over"].fail("must be (source, target) pairs of device numbers")
        return Collective(
            kind,
            groups,
            found["dtype"].text(),
            found["bytes"].integer(),
            found["count"].integer(),
            found["reduction"].text() if "reduction" in found else "",
            found["source"].text() if "source" in found else "",
            "conditional" in found and found["conditional"].flag(),
            "unbounded" in found and found["unbounded"].flag(),
        )


def _input_to_json(each: InputPlan, text: SpecText) -> dict[str, Any]:
    return {
        "path": each.path,
        "role": each.role,
        "spec": text.write(each.spec),
        "shape": list(each.shape),
        "bytes": each.bytes,
        **({"memory": each.memory} if each.memory != "device" else {}),
    }


def _operator_to_json(each: OperatorPlan, text: SpecText) -> dict[str, Any]:
    return {
        "name": each.name,
        "kind": each.kind,
        "source": each.source,
        "factors": list(each.factors),
        "operands": text.write_all(each.operand_specs),
        "results": text.write_all(each.result_specs),
        "flops": number_to_json(each.flops),
        "split": each.split,
        "seconds": number_to_json(each.seconds),
    }


def _tensor_to_json(each: TensorPlan, text: SpecText) -> dict[str, Any]:
    copies = [
        {"from": text.write(c.source), "to": text.write(c.target)}
        for c in each.conversions
    ]
    return {
        "name": each.name,
        "shape": list(each.shape),
        "dtype": each.dtype,
        "block": each.block,
        "spec": text.write(each.spec),
        **({"copies": copies} if copies else {}),
    }


def _collective_to_json(each: Collective, text: SpecText) -> dict[str, Any]:
    optional: Mapping[str, Any] = {
        "reduction": each.reduction,
        "source": each.source,
        "conditional": each.conditional,
        "unbounded": each.unbounded,
    }
    return {
        "kind": each.kind,
        "over": text.write_groups(each.groups, each.kind),
        "dtype": each.dtype,
        "bytes": each.bytes,
        "count": each.count,
        **{name: value for name, value in optional.items() if value},
    }


def mesh_to_json(mesh: MeshShape) -> dict[str, int]:
    """Sizes by axis name."""
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def mesh_from_json(record: Record) -> MeshShape:
    """The mesh that `mesh_to_json` wrote."""
    if not isinstance(record.value, dict):
        record.fail("must be an object of axis names and sizes")
    found = record.fields(record.value)
    sizes = tuple(found[name].integer(least=1) for name in record.value)
    try:
        return MeshShape(tuple(record.value), sizes)
    except ValueError as error:
        record.fail(f"is no mesh: {error}")


def prediction_to_json(predicted: Prediction) -> dict[str, Any]:
    """All figures by name; infinities are strings."""
    values = {f.name: getattr(predicted, f.name) for f in fields(Prediction)}
    values = {n: v for n, v in values.items() if v or n not in _LATER}
    return {
        name: int(value) if name in _COUNTS else number_to_json(value)
        for name, value in values.items()
    }


def prediction_from_json(record: Record) -> Prediction:
    """The figures that `prediction_to_json` wrote."""
    names = [f.name for f in fields(Prediction)]
    optional = (*_LATER, _FREE_GAP)
    found = record.fields([n for n in names if n not in optional], optional)
    values: dict[str, Any] = {
        name: found[name].integer() if name in _COUNTS else found[name].number()
        for name in names
        if name in found
    }
    if _FREE_GAP in found:
        values["optimality_gap"] = found[_FREE_GAP].number()
    return Prediction(**values)


def lines_of(document: Mapping[str, Any]) -> str:
    """A document with a line for each member, and for each item of its lists."""
    lines = ",\n".join(f"  {_line(k)}: {_layout(v)}" for k, v in document.items())
    return f"{{\n{lines}\n}}"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _layout(value: Any) -> str:
    """Lists with one item a line; everything else on one line."""
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return _line(value)
    items = ",\n".join(f"    {_line(item)}" for item in value)
    return f"[\n{items}\n  ]"
