"""A planned pipeline on devices: its programs, and how leaves become slots and back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..audit.audit import Audit, MemoryUse, audit
from ..audit.compiled_collectives import collectives_in_lowered, collectives_on
from ..graph.op_graph import TensorType
from ..graph.traced_function import TracedFunction
from ..jax_compat import without_mesh
from ..lowering.compiled_program import compile_program
from ..lowering.device_mesh import absent_mesh, stage_meshes
from ..lowering.host_memory import HOST
from ..lowering.partial_sums import held_shape, held_spec
from ..lowering.programs import (
    PipelineProgram,
    SignatureChanged,
    SpmdProgram,
)
from ..microbatches.extremes import start_of
from ..microbatches.microbatch_runners import join_parts
from ..plans.staged_plan import StagedPlan
from ..sharding.spec import Spec, State
from ..state.array_chunks import gather_leaf, join_leaf, on_auto_axes, split_leaf
from ..state.distributed_array import DistributedArray, signature
from ..state.examples import microbatches_of
from ..targets.target import Target
from ..transforms.chunked_step import ChunkedStep
from ..transforms.update_loops import Updates
from .pipeline_plan import PlannedPipeline
from .program_plans import PlannedProgram
from .step_parts import COUNTER, StepParts


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """A planned stage program and its program on the devices of its stage."""

    planned: PlannedProgram
    program: SpmdProgram
    _compiled: list[Any] = field(default_factory=list[Any])

    @property
    def name(self) -> str:
        """Its stage and kind, in words."""
        return str(self.planned.cut)

    def compile(self, limit_seconds: float = inf) -> Any:
        """Compile for the devices of the stage, once; see `compile_program`."""
        if not self._compiled:
            self._compiled.append(compile_program(self.program, limit_seconds))
        return self._compiled[0]

    def memory(self, limit_seconds: float = inf) -> MemoryUse:
        """What the compiled program holds on a device."""
        return MemoryUse.of(self.compile(limit_seconds), self.program.host_bytes)

    def audit(self) -> Audit:
        """Planned, lowered and compiled collectives."""
        plan, compiled = self.planned.plan, self.compile()
        return audit(
            plan.collectives,
            collectives_in_lowered(self.program.lower()),
            collectives_on(plan.mesh.size, compiled.as_text() or ""),
            num_devices=plan.mesh.size,
            mesh=plan.mesh,
            memory=self.memory(),
            predicted_bytes=plan.predicted.peak_bytes,
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


@dataclass(frozen=True, eq=False)
class Pipeline:
    """One signature of a step as stage programs, and how leaves become slots."""

    planned: PlannedPipeline
    program: PipelineProgram
    lowered: tuple[LoweredProgram, ...]
    argument_types: tuple[tuple[tuple[int, ...], Any], ...]
    _prepare: Callable[..., Any]
    _cut: Callable[..., Any]

    @property
    def traced(self) -> TracedFunction:
        """The step itself."""
        return self.planned.traced

    @property
    def chunked(self) -> ChunkedStep:
        """The step with scans cut by length, whose leaf chunks have slots."""
        return self.planned.made.chunked

    @property
    def parts(self) -> StepParts:
        """The functions that the chunked step is made of."""
        return self.planned.made.parts

    def split(self, leaves: Sequence[Any]) -> list[Any]:
        """The step's argument leaves in chunks, each where it lies if it lies home."""
        chunks: list[Any] = []
        for leaf, lengths in zip(leaves, self.chunked.input_lengths, strict=True):
            if lengths is None:
                chunks.append(leaf)
                continue
            first = len(chunks)
            names = self.chunked.traced.input_paths[first : first + len(lengths)]
            chunks.extend(split_leaf(leaf, lengths, [self.home(n) for n in names]))
        return chunks

    def join(self, chunks: Sequence[Any]) -> list[Any]:
        """The step's result leaves from their chunks."""
        waiting = zip(chunks, self.planned.next_leaf, strict=True)
        leaves = []
        for lengths in self.chunked.output_lengths:
            number = 1 if lengths is None else len(lengths)
            parts, of_state = zip(*itertools.islice(waiting, number), strict=True)
            if lengths is None:
                leaves.extend(parts)
            elif of_state[0] is None:
                leaves.append(gather_leaf(parts))
            else:
                leaves.append(join_leaf(parts))
        return leaves

    def home(self, name: str) -> NamedSharding | None:
        """Where a slot lives, if some stage holds or reads it."""
        slot = self.program.slots.get(name)
        return None if slot is None else self.program.shardings.get((name, slot.stage))

    def constants(self) -> dict[str, Any]:
        """The arrays that the step closes over, by slot."""
        found = self._closed_over()
        return {n: value for n, value in found.items() if self.is_slot(n, "state")}

    def _closed_over(self) -> dict[str, Any]:
        arrays = self.chunked.traced.jaxpr.consts
        inputs = [i.path for i in self.parts.step.graph.inputs if i.role == "constant"]
        return dict(zip(inputs, arrays, strict=True))

    def state_of(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The leaf chunks that live on stages and what was prepared, by slot."""
        named = dict(zip(self.chunked.traced.input_paths, leaves, strict=True))
        found = dict(named)
        if self.parts.prepared:
            known = {**self._closed_over(), **named}
            given = [known[path] for path in self.parts.preparing]
            number = len(self.parts.batch)
            whole = [
                _here(leaf, is_read)
                for leaf, is_read in zip(
                    given[:number], self._is_prepared_from, strict=True
                )
            ]
            values = self._prepare(*whole, *_beside(whole, given[number:]))
            found.update(zip(self.parts.prepared, values, strict=True))
        return {n: value for n, value in found.items() if self.is_slot(n, "state")}

    @cached_property
    def _is_prepared_from(self) -> tuple[bool, ...]:
        """For each leaf of the batch whether something is prepared from it."""
        jaxpr = self.parts.prepare.jaxpr
        read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
        read |= {id(v) for v in jaxpr.outvars}
        return tuple(id(v) in read for v in jaxpr.invars[: len(self.parts.batch)])

    def is_slot(self, name: str, kind: str) -> bool:
        """Whether some stage holds or reads a slot of this kind and name."""
        slot = self.program.slots.get(name)
        return slot is not None and slot.kind == kind

    def batch_of(self, leaves: Sequence[Any]) -> dict[str, list[Any]]:
        """A value for each microbatch, by slot: the batch, cut minor."""
        number = self.program.num_microbatches
        named = dict(zip(self.chunked.traced.input_paths, leaves, strict=True))
        batch = {path: named[path] for path in self.parts.batch}
        fed: dict[str, list[Any]] = {}
        for path, leaf in batch.items() if self.planned.cluster.ray_hosts else ():
            if parts := microbatches_of(leaf, number):  # hosts read them
                fed[path] = [*parts]
        whole = {p: _here(leaf) for p, leaf in batch.items() if p not in fed}
        fed |= zip(whole, self._cut(*whole.values()), strict=True)
        fed[COUNTER] = [np.uint32(m) for m in range(number)]
        return {n: parts for n, parts in fed.items() if self.is_slot(n, "batch")}

    @property
    def target(self) -> str | None:
        """The devices that its programs are compiled for, if these are not here."""
        targets = [each.program.target for each in self.lowered]
        return " + ".join(dict.fromkeys(str(t) for t in targets if t)) or None

    @cached_property
    def compiled(self) -> tuple[jax.stages.Compiled, ...]:
        """The programs on the devices of this process, compiled side by side.

        In a step, each would wait for those that make what it reads.
        """
        if self.planned.cluster.ray_hosts is not None or self.target is not None:
            return ()  # the hosts compile their own
        programs = [each.program for each in self.lowered]
        for program in programs:
            program.lower()  # here, under the caller's settings
        with ThreadPoolExecutor(thread_name_prefix="autopar-compile") as threads:
            return tuple(threads.map(lambda program: program.compile(), programs))

    def audit(self) -> tuple[Audit, ...]:
        """Planned, lowered and compiled collectives of every stage program."""
        return tuple(each.audit() for each in self.lowered)

    def compiled_peaks(
        self, plan: StagedPlan, limit_seconds: float = inf
    ) -> tuple[int, ...]:
        """What a device of each submesh holds with programs as compiled.

        `plan` is that of the pipeline, whose schedule holds values besides.
        """
        planned = self.planned
        seen = {e.planned: e.memory(limit_seconds).device_bytes for e in self.lowered}
        peaks = (round(peak / planned.memory_correction) for peak in plan.peak_bytes)
        return tuple(
            peak - planned.working_bytes(i) + planned.working_bytes(i, seen)
            for i, peak in enumerate(peaks)
        )

    def results_from(
        self, leaves: Sequence[Any], values: Mapping[str, Any]
    ) -> list[Any]:
        """The chunks of the step's result, from new state and results by slot."""
        traced, parts, planned = self.chunked.traced, self.parts, self.planned
        named = {**dict(zip(traced.input_paths, leaves, strict=True)), **values}
        results = []
        for path, leaf in zip(traced.output_paths, planned.next_leaf, strict=True):
            if path in parts.joined:
                results.append(self.joined(values, *parts.joined[path]))
            elif path in parts.fed:
                results.append(named[parts.fed[path]])
            elif path in planned.made.programs.unchanged:
                results.append(named[planned.made.programs.unchanged[path]])
            else:
                results.append(
                    named[path if leaf is None else traced.input_paths[leaf]]
                )
        return results

    def joined(self, values: Mapping[str, Any], slot: str, dim: int, grain: int) -> Any:
        """A value for each example of the batch from those of all microbatches."""
        return _join_minor(dim, grain, self.home(slot))(tuple(values[slot]))


@dataclass(frozen=True, eq=False)
class PipelinedStep:
    """A pipeline and what executes it: flat leaves in, flat leaves out.

    `record` executes it too, and returns a trace of the step besides; `constants` are
    the arrays that the step closes over, where the last step left them.
    """

    pipeline: Pipeline
    execute: Callable[..., tuple[dict[str, Any], dict[str, Any]]]
    record: Callable[..., tuple[dict[str, Any], dict[str, Any], Any]]
    constants: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, leaves: Sequence[Any], traces: list[Any] | None = None
    ) -> list[Any]:
        """One step, whose trace is put to `traces`, if these are given.

        Raises:
          SignatureChanged: other shapes or dtypes than those it was planned for.
        """
        return self._run_updates(self.pipeline.planned.updates, leaves, traces)

    def _run_updates(
        self,
        updates: tuple[Updates, ...],
        leaves: Sequence[Any],
        traces: list[Any] | None,
    ) -> list[Any]:
        if not updates:
            return self._run(leaves, traces)
        (loop, *inner) = updates
        leaves = [
            jnp.asarray(leaf)
            if i in loop.sliced and isinstance(leaf, DistributedArray)
            else leaf
            for i, leaf in enumerate(leaves)
        ]
        if any(len(leaves[i]) != len(loop.order) for i in loop.sliced):
            raise SignatureChanged
        return loop.run(
            leaves, lambda given: self._run_updates(tuple(inner), given, traces)
        )

    def _run(self, leaves: Sequence[Any], traces: list[Any] | None) -> list[Any]:
        if tuple(map(signature, leaves)) != self.pipeline.argument_types:
            raise SignatureChanged
        with without_mesh():  # a caller's is not that of the stages
            _ = self.pipeline.compiled  # before threads wait for each other's programs
            chunks = self.pipeline.split(leaves)
            constants = self.constants or self.pipeline.constants()
            given = {**self.pipeline.state_of(chunks), **constants}
            batch = self.pipeline.batch_of(chunks)
            if traces is None:
                state, results = self.execute(given, batch)
            else:
                state, results, trace = self.record(given, batch)
                traces.append(trace)
            self.constants.update((name, state[name]) for name in constants)
            found = self.pipeline.results_from(chunks, {**state, **results})
            return self.pipeline.join(found)


def lower_pipeline(planned: PlannedPipeline, *, is_absent: bool = False) -> Pipeline:
    """The pipeline on the devices of this process, or on those of its Ray hosts.

    Where `is_absent`, to be compiled only, for devices that are not here.

    Raises:
      ValueError: there are too few devices.
      TargetError: a submesh does not fit the hosts.
    """
    flow, specs, types = planned.flow, planned.specs, planned.types
    meshes, targets = _meshes_of(planned, is_absent)
    shardings = {
        (name, stage): NamedSharding(
            meshes[stage],
            held_spec(spec, types[name].rank, meshes[stage].axis_names),
        )
        for (name, stage), spec in specs.items()
    }
    for each in planned.programs:
        for key in ((name, each.stage) for name in each.host_slots):
            shardings[key] = shardings[key].with_memory_kind(HOST)
    lowered = tuple(
        LoweredProgram(
            each,
            replace(
                each.program(
                    planned.cluster_of(planned.submesh(each.stage)), meshes[each.stage]
                ),
                target=targets[each.stage],
            ),
        )
        for each in planned.programs
    )
    zeros = {
        name: _start(
            reduction,
            *(types[name], specs[name, each.stage], shardings[name, each.stage]),
        )
        for each in planned.programs
        for name, reduction in each.cut.added.items()
    }
    programs = tuple(each.planned.running(_runner_of(each.program)) for each in lowered)
    jaxpr = planned.traced.jaxpr.jaxpr
    return Pipeline(
        planned,
        replace(flow, programs=programs, shardings=shardings, zeros=zeros),
        lowered,
        tuple((var.aval.shape, var.aval.dtype) for var in jaxpr.invars),
        jax.jit(jaxpr_as_fun(planned.made.parts.prepare)),
        jax.jit(functools.partial(_cut_minor, flow.num_microbatches)),
    )


def _meshes_of(
    planned: PlannedPipeline, is_absent: bool
) -> tuple[Sequence[Mesh | AbstractMesh], Sequence[Target | None]]:
    """The mesh of each stage, and what it is compiled for if that is not here."""
    submeshes = [planned.submesh(stage) for stage in range(planned.flow.num_stages)]
    if not is_absent:
        by_submesh = stage_meshes(planned.shapes, planned.cluster)
        return [by_submesh[i] for i in submeshes], [None] * len(submeshes)
    shapes = [planned.shapes[i] for i in submeshes]
    clusters = map(planned.cluster_of, submeshes)
    targets = [
        Target.of(cluster, shape.size)
        for cluster, shape in zip(clusters, shapes, strict=True)
    ]
    meshes = [
        absent_mesh(shape, target.name, target.platform)
        for shape, target in zip(shapes, targets, strict=True)
    ]
    return meshes, targets


def _here(leaf: Any, is_read: bool = True) -> Any:
    """A leaf of the batch where it lies, or its values if hosts are to read it.

    Where nobody reads these, zeros.
    """
    if not isinstance(leaf, DistributedArray):
        return on_auto_axes(leaf)
    if is_read:
        return np.asarray(leaf)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _beside(batch: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Leaves of any stage, copied to where the batch lies, or to the first device."""
    here: Any = jax.devices()[0]
    for leaf in batch:
        if isinstance(leaf, jax.Array) and leaf.committed:
            (here, *_) = leaf.sharding.device_set
            if isinstance(leaf.sharding, NamedSharding):
                here = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    local = (x if isinstance(x, jax.Array) else np.asarray(x) for x in others)
    return [jax.device_put(each, here) for each in local]


def _cut_minor(number: int, *whole: jax.Array) -> list[list[jax.Array]]:
    """Microbatch m of an array holds its rows i with i mod `number` = m."""
    spread = [x.reshape(x.shape[0] // number, number, *x.shape[1:]) for x in whole]
    return [[x[:, m] for m in range(number)] for x in spread]


@functools.lru_cache(maxsize=256)
def _join_minor(
    dim: int, grain: int, home: NamedSharding | None
) -> Callable[..., jax.Array]:
    """The inverse of `_cut_minor` along `dim`; the whole is split as its parts are."""
    return jax.jit(
        lambda parts: join_parts(jnp.stack(parts), dim, grain), out_shardings=home
    )
