"""Plans as JSON: versioned, data only, made to be read, compared and edited by hand.

A plan of a pipeline holds that of each stage program in the form of a plan of one. One
line for each input, operator, tensor and collective. A spec is the dims that mesh
axes split and the reductions they owe, `data:0 model:sum`; an axis that is not named
holds replicas, and `-` says that all do. Seconds are of one step, bytes of one device.

A form says once what a value has in a file, and is both written and read by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from textwrap import indent
from typing import Any, Generic, TypeVar, get_args

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
from .record import Record, number_to_json, read_json
from .spec_text import SpecText
from .staged_plan import PlannedTransfer, StagedPlan, StageProgramPlan

FORMAT = "autopar-plan"
STAGED_FORMAT = "autopar-pipeline-plan"
VERSION = 1

_COUNTS = ("collective_bytes", "peak_bytes", "budget_bytes", "host_bytes")
_LATER = ("host_seconds", "host_bytes")  # not in files of earlier versions
_FREE_GAP = "free_gap"  # in earlier files, where a budget bound
_NEEDED: Any = object()
_T = TypeVar("_T")


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Entry:
    """How a field of a value is read and written, and what it is where left out.

    `name` is what the value itself calls it, if that is something else.
    """

    read: Callable[[Record], Any]
    write: Callable[[Any], Any] = _same
    default: Any = _NEEDED
    name: str = ""


def _unchecked(value: Any, found: Mapping[str, Record]) -> None:
    del value, found


@dataclass(frozen=True)
class _Form(Generic[_T]):
    """A value as an object: its entries in order, and what is checked of it besides."""

    make: Callable[..., _T]
    entries: Mapping[str, _Entry]
    check: Callable[[_T, Mapping[str, Record]], None] = _unchecked

    def write(self, value: _T) -> dict[str, Any]:
        given = {n: getattr(value, e.name or n) for n, e in self.entries.items()}
        return {
            name: entry.write(given[name])
            for name, entry in self.entries.items()
            if given[name] != entry.default
        }

    def read(self, record: Record, others: Collection[str] = (), **more: Any) -> _T:
        """The value of an object that has `others` besides, made with `more`."""
        needed = [n for n, e in self.entries.items() if e.default is _NEEDED]
        found = record.fields([*others, *needed], self.entries)
        for name, entry in self.entries.items():
            is_there = name in found
            more[entry.name or name] = (
                entry.read(found[name]) if is_there else entry.default
            )
        value = self.make(**more)
        self.check(value, found)
        return value


def _one_of(kind: Any) -> _Entry:
    return _Entry(lambda record: record.text(get_args(kind) or kind))


def _count(least: int = 0, below: int | None = None) -> _Entry:
    return _Entry(lambda record: record.integer(least, below))


def _all(entry: _Entry | _Form[Any]) -> _Entry:
    """A list of what an entry or a form reads and writes."""
    return _Entry(
        lambda record: tuple(map(entry.read, record.items())),
        lambda values: list(map(entry.write, values)),
    )


_TEXT, _NUMBER = _Entry(Record.text), _Entry(Record.number, number_to_json)
_SIZES = _Entry(Record.integers, list)


def to_json(plan: Decision) -> str:
    """The plan as a JSON document; `read_plan` gives an equal plan back."""
    if isinstance(plan, ShardingPlan):
        document = {"format": FORMAT, "version": VERSION, **_plan_to_json(plan)}
        return f"{_lines_of(document)}\n"
    document = {"format": STAGED_FORMAT, "version": VERSION}
    head = _lines_of(document | _staged_form(plan.num_stages).write(plan))
    programs = ",\n".join(
        indent(
            _lines_of({"stage": e.stage, "kind": e.kind, **_plan_to_json(e.sharding)}),
            "    ",
        )
        for e in plan.programs
    )
    head = head.removesuffix("\n}")
    return f'{head},\n  "programs": [\n{programs}\n  ]\n}}\n'


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
        return _plan_from_json(root, ["format", "version"])
    number = root.member("num_stages").integer(least=2)
    programs = tuple(_program(p, number) for p in root.member("programs").items())
    others = ["format", "version", "programs"]
    return _staged_form(number).read(root, others, programs=programs)


def from_json(text: str, where: str) -> ShardingPlan:
    """As `read_plan`, of one program."""
    found = read_plan(text, where)
    if not isinstance(found, ShardingPlan):
        Record(where, "format", None).fail(f"must be {FORMAT!r}, of one program")
    return found


def _plan_to_json(plan: ShardingPlan) -> dict[str, Any]:
    return _plan_form(plan.mesh, len(plan.trip_counts)).write(plan)


def _plan_from_json(record: Record, others: Sequence[str]) -> ShardingPlan:
    """The plan in an object with `others` besides."""
    num_blocks = len(record.member("trip_counts").integers())
    outputs = record.member("outputs")
    if (number := len([*outputs.items()])) != num_blocks:
        outputs.fail(
            f"must have one list for each of {num_blocks} trip counts, but got {number}"
        )
    mesh = _mesh_from_json(record.member("mesh"))
    return _plan_form(mesh, num_blocks).read(record, others)


def _program(record: Record, num_stages: int) -> StageProgramPlan:
    stage, kind = record.member("stage"), record.member("kind")
    own = stage.integer(below=num_stages), _one_of(TaskKind).read(kind)
    return StageProgramPlan(*own, _plan_from_json(record, ["stage", "kind"]))


def _staged_form(num_stages: int) -> _Form[StagedPlan]:
    """All but the programs of a pipeline."""
    transfer = {
        "slot": _TEXT,
        "source": _count(below=num_stages),
        "target": _count(below=num_stages),
        "bytes": _count(),
        "count": _count(least=1),
    }

    def check(plan: StagedPlan, found: Mapping[str, Record]) -> None:
        if not plan.meshes or num_stages % len(plan.meshes):
            found["meshes"].fail(
                f"must have a mesh for each of {num_stages} stages, or divide them, "
                f"but has {len(plan.meshes)}"
            )

    entries = {
        "function": _TEXT,
        "cluster": _TEXT,
        "schedule": _TEXT,
        "microbatch_semantics": _one_of(MicrobatchSemantics),
        "num_stages": _count(),
        "num_microbatches": _count(least=1),
        "predicted": _PREDICTION,
        "meshes": _all(_MESH),
        "transfers": _all(_Form(PlannedTransfer, transfer)),
        "rows": _all(_TEXT),
        "peak_bytes": _SIZES,
        "stage_products": replace(_SIZES, default=()),
    }
    return _Form(StagedPlan, entries, check)


def _plan_form(mesh: MeshShape, num_blocks: int) -> _Form[ShardingPlan]:
    text = SpecText(mesh)
    spec = _Entry(text.read, text.write)
    specs = _all(spec)

    def check_legal(record: Record, shape: Sequence[int], spec: Spec) -> None:
        if not is_legal(shape, spec, mesh.axis_sizes):
            record.fail(
                f"cannot split the shape {list(shape)} evenly on the mesh {mesh}, "
                f"but got {record.value!r}"
            )

    def check_input(each: InputPlan, found: Mapping[str, Record]) -> None:
        check_legal(found["spec"], each.shape, each.spec)
        if is_pending(each.spec) and each.role != "sum":
            found["spec"].fail("must owe no reduction, as an argument is complete")

    def check_tensor(each: TensorPlan, found: Mapping[str, Record]) -> None:
        check_legal(found["spec"], each.shape, each.spec)
        made = {each.spec}
        records = found["copies"].items() if "copies" in found else ()
        for copy, record in zip(each.conversions, records, strict=True):
            source, target = record.member("from"), record.member("to")
            check_legal(source, each.shape, copy.source)
            check_legal(target, each.shape, copy.target)
            if copy.source not in made:
                source.fail("must be a spec that the tensor has by then")
            if copy.target in made:
                target.fail("must be a spec the tensor does not have yet")
            made.add(copy.target)

    def collective(kind: str, groups: Record, **others: Any) -> Collective:
        found = text.read_groups(groups, kind)
        if kind == "collective_permute" and any(len(pair) != 2 for pair in found):
            groups.fail("must be (source, target) pairs of device numbers")
        return Collective(kind, found, **others)

    def write_collective(each: Collective) -> dict[str, Any]:
        over = text.write_groups(each.groups, each.kind)
        return {**collectives.write(each), "over": over}

    inputs = {
        "path": _TEXT,
        "role": _one_of(Role),
        "spec": spec,
        "shape": _SIZES,
        "bytes": _count(),
        "memory": replace(_one_of(MemoryKind), default="device"),
    }
    operators = {
        "name": _TEXT,
        "kind": _TEXT,
        "source": _TEXT,
        "factors": _all(_TEXT),
        "operands": replace(specs, name="operand_specs"),
        "results": replace(specs, name="result_specs"),
        "flops": _NUMBER,
        "split": _count(least=1),
        "seconds": _NUMBER,
    }
    pair = {"from": replace(spec, name="source"), "to": replace(spec, name="target")}
    copies = _all(_Form(Conversion, pair))
    tensors = {
        "name": _TEXT,
        "shape": _SIZES,
        "dtype": _TEXT,
        "block": _count(below=num_blocks),
        "spec": spec,
        "copies": replace(copies, default=(), name="conversions"),
    }
    flag = _Entry(Record.flag, default=False)
    collectives = _Form(
        collective,
        {
            "kind": _one_of(KINDS),
            "over": _Entry(_same, name="groups"),
            "dtype": _TEXT,
            "bytes": _count(),
            "count": _count(),
            "reduction": replace(_TEXT, default=""),
            "source": replace(_TEXT, default=""),
            "conditional": flag,
            "unbounded": flag,
        },
    )
    entries = {
        "function": _TEXT,
        "mesh": _MESH,
        "cluster": _TEXT,
        "remat": _Entry(_remat_from_json, default=""),
        "device_kind": replace(_TEXT, default=""),
        "padding": _Entry(_padding_from_json, default=()),
        "predicted": _PREDICTION,
        "inputs": _all(_Form(InputPlan, inputs, check_input)),
        "operators": _all(_Form(OperatorPlan, operators)),
        "tensors": _all(_Form(TensorPlan, tensors, check_tensor)),
        "outputs": _all(specs),
        "trip_counts": _SIZES,
        "collectives": replace(
            _all(collectives), write=lambda some: list(map(write_collective, some))
        ),
    }
    return _Form(ShardingPlan, entries)


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


def _mesh_to_json(mesh: MeshShape) -> dict[str, int]:
    """Sizes by axis name."""
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def _mesh_from_json(record: Record) -> MeshShape:
    if not isinstance(record.value, dict):
        record.fail("must be an object of axis names and sizes")
    found = record.fields(record.value)
    sizes = tuple(found[name].integer(least=1) for name in record.value)
    try:
        return MeshShape(tuple(record.value), sizes)
    except ValueError as error:
        record.fail(f"is no mesh: {error}")


def _prediction_from_json(record: Record) -> Prediction:
    if not (isinstance(record.value, dict) and _FREE_GAP in record.value):
        return _FIGURES.read(record)
    gap = record.member(_FREE_GAP).number()
    return replace(_FIGURES.read(record, [_FREE_GAP]), optimality_gap=gap)


_MESH = _Entry(_mesh_from_json, _mesh_to_json)
_FIGURES = _Form(
    Prediction,
    {
        each.name: replace(
            _Entry(Record.integer, int) if each.name in _COUNTS else _NUMBER,
            default=0 if each.name in _LATER else _NEEDED,
        )
        for each in fields(Prediction)
    },
)
_PREDICTION = _Entry(_prediction_from_json, _FIGURES.write)


def _lines_of(document: Mapping[str, Any]) -> str:
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
