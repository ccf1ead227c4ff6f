"""Plans of pipelines as JSON: versioned, with the plan of every stage program inside.

The form of a stage program's plan is that of `plan_file`.
"""

from __future__ import annotations

from textwrap import indent
from typing import Any, get_args

from ..lowering.programs import TaskKind
from ..microbatches.microbatch_semantics import MicrobatchSemantics
from .plan_file import (
    lines_of,
    mesh_from_json,
    mesh_to_json,
    plan_from_json,
    plan_to_json,
    prediction_from_json,
    prediction_to_json,
)
from .record import Record, read_json
from .staged_plan import PlannedTransfer, StagedPlan, StageProgramPlan

FORMAT = "autopar-pipeline-plan"
VERSION = 1

_TEXTS = ("function", "cluster", "schedule", "microbatch_semantics")
_COUNTS = ("num_stages", "num_microbatches")
_LISTS = ("meshes", "transfers", "rows", "peak_bytes", "programs")
_LATER = "stage_products"  # not in files of earlier versions


def is_staged(text: str) -> bool:
    """Whether a document is a plan of a pipeline, if it is a plan at all."""
    return f'"{FORMAT}"' in text[:200]


def to_json(plan: StagedPlan) -> str:
    """The plan as a JSON document; `from_json` gives an equal plan back."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(plan, name) for name in (*_TEXTS, *_COUNTS)},
        "predicted": prediction_to_json(plan.predicted),
        "meshes": [mesh_to_json(mesh) for mesh in plan.meshes],
        "transfers": [vars(each) for each in plan.transfers],
        "rows": list(plan.rows),
        "peak_bytes": list(plan.peak_bytes),
        **({_LATER: list(plan.stage_products)} if plan.stage_products else {}),
    }
    programs = ",\n".join(indent(_program_to_json(p), "    ") for p in plan.programs)
    head = lines_of(document).removesuffix("\n}")
    return f'{head},\n  "programs": [\n{programs}\n  ]\n}}\n'


def from_json(text: str, where: str) -> StagedPlan:
    """The plan that `to_json` wrote.

    Args:
      text: the document.
      where: what errors call it, such as the file's path.

    Raises:
      PlanFileError: no plan, truncated, of another version, or a field that makes no
        sense; names `where`, the field and the reason.
    """
    root = read_json(text, where)
    names = ["format", "version", "predicted", *_TEXTS, *_COUNTS, *_LISTS]
    top = root.fields(names, [_LATER])
    if top["version"].value != VERSION:
        top["version"].fail(
            f"must be {VERSION}, the version that this autopar reads, but got "
            f"{top['version'].value}"
        )
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
        programs=tuple(
            _program_from_json(item, num_stages) for item in top["programs"].items()
        ),
        transfers=tuple(
            _transfer_from_json(item, num_stages) for item in top["transfers"].items()
        ),
        rows=tuple(item.text() for item in top["rows"].items()),
        peak_bytes=top["peak_bytes"].integers(),
        predicted=prediction_from_json(top["predicted"]),
        stage_products=top[_LATER].integers() if _LATER in top else (),
    )


def _program_to_json(program: StageProgramPlan) -> str:
    members = {"stage": program.stage, "kind": program.kind}
    return lines_of({**members, **plan_to_json(program.sharding)})


def _program_from_json(record: Record, num_stages: int) -> StageProgramPlan:
    plan = plan_from_json(record, ["stage", "kind"])
    prefix = f"{record.field}."
    stage = Record(record.where, f"{prefix}stage", record.value["stage"])
    kind: Any = Record(record.where, f"{prefix}kind", record.value["kind"])
    return StageProgramPlan(
        stage.integer(below=num_stages), kind.text(get_args(TaskKind)), plan
    )


def _transfer_from_json(record: Record, num_stages: int) -> PlannedTransfer:
    found = record.fields(["slot", "source", "target", "bytes", "count"])
    return PlannedTransfer(
        found["slot"].text(),
        found["source"].integer(below=num_stages),
        found["target"].integer(below=num_stages),
        found["bytes"].integer(),
        found["count"].integer(least=1),
    )
