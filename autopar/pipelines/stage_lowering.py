"""Planned stage programs on the devices of their submeshes, as something that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..audit.audit import Audit, MemoryUse, audit
from ..audit.compiled_collectives import collectives_on
from ..audit.lowered_collectives import collectives_in_lowered
from ..clusters.cluster import Cluster
from ..graph.op_graph import TensorType
from ..lowering.compiled_program import compile_program
from ..lowering.host_memory import HOST
from ..lowering.partial_sums import held_shape, held_spec
from ..lowering.programs import PipelineProgram, Slot, SpmdProgram, StageProgram
from ..microbatches.extremes import start_of
from ..sharding.spec import Spec, State
from ..targets.target import Target
from .stage_pieces import PlannedPiece


@dataclass(frozen=True, eq=False)
class LoweredPiece:
    """A planned stage program and its program on the devices of its stage."""

    planned: PlannedPiece
    program: SpmdProgram
    _compiled: list[Any] = field(default_factory=list[Any])

    @property
    def name(self) -> str:
        """Its stage and kind, in words."""
        return f"stage {self.planned.piece.stage}, {self.planned.piece.kind}"

    def compile(self, limit_seconds: float = inf) -> Any:
        """Compile for the devices of the stage, once; see `compile_program`."""
        if not self._compiled:
            self._compiled.append(compile_program(self.program, limit_seconds))
        return self._compiled[0]

    def audit(self) -> Audit:
        """Planned, lowered and compiled collectives."""
        plan, compiled = self.planned.plan, self.compile()
        return audit(
            plan.collectives,
            collectives_in_lowered(self.program.lower()),
            collectives_on(plan.mesh.size, compiled.as_text() or ""),
            num_devices=plan.mesh.size,
            mesh=plan.mesh,
            memory=MemoryUse.of(compiled, self.program.host_bytes),
            predicted_bytes=plan.predicted.peak_bytes,
        )


def dataflow(
    num_stages: int,
    num_microbatches: int,
    slots: Mapping[str, Slot],
    pieces: Sequence[PlannedPiece],
) -> PipelineProgram:
    """The stage programs without code: to emit and simulate, not to run."""
    return PipelineProgram(
        num_stages,
        num_microbatches,
        slots,
        tuple(_stage_program(piece, _refuse_to_run) for piece in pieces),
        shardings={},
        zeros={},
    )


def lower_stages(
    flow: PipelineProgram,
    pieces: Sequence[PlannedPiece],
    specs: Mapping[tuple[str, int], Spec],
    types: Mapping[str, TensorType],
    clusters: Sequence[Cluster],
    meshes: Sequence[Mesh | AbstractMesh],
    targets: Sequence[Target] | None = None,
) -> tuple[tuple[LoweredPiece, ...], PipelineProgram]:
    """The programs of a dataflow on the mesh of each stage.

    `specs` are those of each slot on each stage that holds it, `types` by slot,
    `clusters` what each stage is of, `targets` what it is compiled for if its devices
    are not here.
    """
    shardings = {
        (name, stage): NamedSharding(
            meshes[stage],
            held_spec(spec, types[name].rank, meshes[stage].axis_names),
        )
        for (name, stage), spec in specs.items()
    }
    for piece in pieces:
        for key in ((name, piece.piece.stage) for name in piece.host_slots):
            shardings[key] = shardings[key].with_memory_kind(HOST)
    lowered = []
    for piece in pieces:
        stage = piece.piece.stage
        made = piece.program(clusters[stage], meshes[stage])
        if targets is not None:
            made = replace(made, target=targets[stage])
        lowered.append(LoweredPiece(piece, made))
    zeros = {
        name: _start(reduction, types[name], specs[name, stage], shardings[name, stage])
        for name, reduction, stage in (
            (*each, piece.piece.stage)
            for piece in pieces
            for each in piece.piece.added.items()
        )
    }
    program = PipelineProgram(
        flow.num_stages,
        flow.num_microbatches,
        flow.slots,
        tuple(_stage_program(p.planned, _runner_of(p.program)) for p in lowered),
        shardings,
        zeros,
    )
    return tuple(lowered), program


def _stage_program(
    piece: PlannedPiece, run: Callable[[Sequence[Any]], Sequence[Any]]
) -> StageProgram:
    return StageProgram(
        piece.piece.stage,
        piece.piece.kind,
        piece.inputs,
        piece.outputs,
        run,
        piece.donated,
    )


def _start(
    reduction: State, kind: TensorType, spec: Spec, sharding: NamedSharding
) -> Callable[[], Any]:
    shape = held_shape(kind.shape, spec, sharding.mesh.axis_sizes)
    made = jax.jit(
        lambda: start_of(reduction, shape, kind.dtype), out_shardings=sharding
    )

    def start() -> Any:
        with jax.enable_x64(True):  # a stage's thread has not the caller's settings
            return made()

    return start


def _runner_of(program: SpmdProgram) -> Callable[[Sequence[Any]], Sequence[Any]]:
    def run(values: Sequence[Any]) -> Sequence[Any]:
        compiled = program.compile()
        return program.watched(lambda: compiled(program.constants, *values))

    return run


def _refuse_to_run(_: Sequence[object]) -> list[object]:
    raise AssertionError("a planned pipeline has no code until it is lowered")
