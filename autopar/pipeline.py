"""A step as a pipeline: trace, cut into stages, plan every stage program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh

from .audit import Audit, MemoryUse, audit
from .build_graph import build_graph
from .cluster import Cluster
from .compiled_collectives import collectives_in_compiled
from .graph import OpGraph
from .lowered_collectives import collectives_in_lowered
from .mesh import MeshShape, parse_mesh
from .methods import PipelineParallel
from .microbatches import split_microbatches
from .options import Options
from .planning import batch_tensors, roles_of
from .programs import PipelineProgram, SignatureChanged
from .roles import Roles
from .stage_apply import cut_apply
from .stage_cut import cut_stages
from .stage_programs import PipelineBuilder, PlannedPiece
from .stage_trace import COUNTER, StepParts, trace_parts
from .tracing import TracedFunction, trace


@dataclass(frozen=True, eq=False)
class Pipeline:
    """One signature of a step as stage programs, and how leaves become slots.

    `next_leaf` is the argument leaf that each result leaf is the next value of, or
    None; `result_slots` names every result leaf.
    """

    traced: TracedFunction
    roles: Roles
    parts: StepParts
    program: PipelineProgram
    pieces: tuple[PlannedPiece, ...]
    next_leaf: tuple[int | None, ...]
    argument_types: tuple[tuple[tuple[int, ...], Any], ...]
    _prepare: Callable[..., Any]
    _cut: Callable[..., Any]

    def state_of(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The leaves that live on stages and what was prepared, by slot."""
        named = dict(zip(self.traced.input_paths, leaves, strict=True))
        whole = [named[path] for path in self.parts.batch]
        prepared = zip(self.parts.prepared, self._prepare(*whole), strict=True)
        return {
            name: value
            for name, value in (*named.items(), *prepared)
            if self.is_slot(name, "state")
        }

    def is_slot(self, name: str, kind: str) -> bool:
        """Whether some stage holds or reads a slot of this kind and name."""
        slot = self.program.slots.get(name)
        return slot is not None and slot.kind == kind

    def batch_of(self, leaves: Sequence[Any]) -> dict[str, list[Any]]:
        """A value for each microbatch, by slot: the batch, cut minor."""
        number = self.program.num_microbatches
        named = dict(zip(self.traced.input_paths, leaves, strict=True))
        whole = [named[path] for path in self.parts.batch]
        fed: dict[str, list[Any]] = dict(
            zip(self.parts.batch, self._cut(*whole), strict=True)
        )
        fed[COUNTER] = [np.uint32(m) for m in range(number)]
        return {n: parts for n, parts in fed.items() if self.is_slot(n, "batch")}

    def audit(self) -> tuple[Audit, ...]:
        """Planned, lowered and compiled collectives of every stage program."""
        return tuple(
            audit(
                piece.plan.collectives,
                collectives_in_lowered(piece.program.lower()),
                collectives_in_compiled(piece.program.compile().as_text() or ""),
                num_devices=piece.plan.mesh.size,
                mesh=piece.plan.mesh,
                memory=MemoryUse.of(piece.program.compile()),
                predicted_bytes=piece.plan.predicted.peak_bytes,
            )
            for piece in self.pieces
        )

    def results_from(
        self, leaves: Sequence[Any], values: Mapping[str, Any]
    ) -> list[Any]:
        """The leaves of the step's result, from new state and results by slot."""
        results = []
        for path, leaf in zip(self.traced.output_paths, self.next_leaf, strict=True):
            name = path if leaf is None else self.traced.input_paths[leaf]
            results.append(values[name] if name in values else leaves[leaf or 0])
        return results


@dataclass(frozen=True, eq=False)
class PipelinedStep:
    """A pipeline and what executes it: flat leaves in, flat leaves out."""

    pipeline: Pipeline
    execute: Callable[..., tuple[dict[str, Any], dict[str, Any]]]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """One step.

        Raises:
          SignatureChanged: other shapes or dtypes than those it was planned for.
        """
        types = tuple((t.shape, t.dtype) for t in map(jax.typeof, leaves))
        if types != self.pipeline.argument_types:
            raise SignatureChanged
        state, results = self.execute(
            self.pipeline.state_of(leaves), self.pipeline.batch_of(leaves)
        )
        return self.pipeline.results_from(leaves, {**state, **results})


def build_pipeline(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: PipelineParallel,
    options: Options,
) -> Pipeline:
    """Trace `fun` and cut it into the stages that `method` asks for.

    Raises:
      ValueError: more stages than devices or products, or microbatches that do not
        divide the batch.
      BatchCoupledError: the step cannot be cut into microbatches.
      NotImplementedError: what stages cannot do yet; the text names it.
    """
    traced = trace(fun, args, kwargs)
    jaxpr = traced.jaxpr.jaxpr
    roles = roles_of(traced)
    graph = build_graph(traced, roles)
    num_microbatches = method.num_microbatches or options.num_microbatches
    batch = batch_tensors(traced, graph, options)
    split = split_microbatches(graph, batch, num_microbatches, sums_stay_apart=True)
    parts = _tied(trace_parts(traced, graph, split), traced, roles)
    num_stages = method.num_stages or 2
    held = [i.tensor for i in parts.microbatch.inputs if i.path in parts.held]
    cut = cut_stages(parts.microbatch, held, num_stages)
    of_apply = {i.path: i.tensor for i in parts.apply.inputs}
    names = {t.index: t.name for t in parts.microbatch.tensors}
    apply = cut_apply(
        parts.apply,
        {of_apply[names[tensor]]: stage for tensor, stage in cut.home.items()},
        {
            of_apply[name]: cut.made_on[operand][0]
            for name, operand in zip(parts.sums, parts.microbatch.outputs, strict=True)
            if isinstance(operand, int) and operand in cut.made_on
        },
        frozenset(of_apply[name] for name in parts.prepared),
        num_stages - 1,
    )
    cluster = options.cluster or Cluster.local()
    shape, meshes = _submeshes(options, num_stages)
    builder = PipelineBuilder(
        parts,
        cut,
        apply,
        cluster,
        [shape] * num_stages,
        meshes,
        num_microbatches,
        _next_paths(traced, roles),
    )
    program = builder.build()
    next_leaf: list[int | None] = [None] * len(traced.output_paths)
    for leaf, output in enumerate(roles.next_output):
        if output is not None:
            next_leaf[output] = leaf
    return Pipeline(
        traced,
        roles,
        parts,
        program,
        tuple(builder.planned),
        tuple(next_leaf),
        tuple((var.aval.shape, var.aval.dtype) for var in jaxpr.invars),
        jax.jit(jaxpr_as_fun(parts.prepare)),
        jax.jit(functools.partial(_cut_minor, num_microbatches)),
    )


def _cut_minor(number: int, *whole: jax.Array) -> list[list[jax.Array]]:
    """Microbatch m of an array holds its rows i with i mod `number` = m."""
    spread = [x.reshape(x.shape[0] // number, number, *x.shape[1:]) for x in whole]
    return [[x[:, m] for m in range(number)] for x in spread]


def _next_paths(traced: TracedFunction, roles: Roles) -> dict[str, str]:
    """The result path of every state leaf."""
    return {
        path: traced.output_paths[output]
        for path, output in zip(traced.input_paths, roles.next_output, strict=True)
        if output is not None
    }


def _tied(parts: StepParts, traced: TracedFunction, roles: Roles) -> StepParts:
    """The apply graph told which output is the next value of which input."""
    outputs = _next_paths(traced, roles)
    position = {path: i for i, path in enumerate(parts.apply.output_paths)}
    inputs = tuple(
        replace(i, output=position[outputs[i.path]]) if i.path in outputs else i
        for i in parts.apply.inputs
    )
    apply: OpGraph = replace(parts.apply, inputs=inputs)
    return replace(parts, apply=apply)


def _submeshes(options: Options, num_stages: int) -> tuple[MeshShape, list[Mesh]]:
    """The devices dealt out evenly; `mesh` is the shape of one stage's part."""
    devices = np.array(jax.devices())
    if len(devices) % num_stages:
        raise ValueError(
            f"`num_stages` must divide the number of devices for now, but got "
            f"{num_stages} stages and {len(devices)} devices."
        )
    share = len(devices) // num_stages
    shape = MeshShape(("x",), (share,))
    if options.mesh is not None:
        shape = parse_mesh(options.mesh, share)
    auto = (AxisType.Auto,) * shape.num_axes
    return shape, [
        Mesh(part.reshape(shape.axis_sizes), shape.axis_names, axis_types=auto)
        for part in devices.reshape(num_stages, share)
    ]
