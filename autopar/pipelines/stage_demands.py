"""What is asked of a stage program besides its time: pins, tensor parallelism, rules.

Where the inside of stages has a name, the dims that are split with the batch, over a
group of devices and, between layers, along the sequence are found once, from a whole
microbatch, forward and backward: stages agree also where a border lies inside a layer.
So are the names of dims under layout rules, from a whole microbatch and the update. In
the program of a stage both are found again by following them from what comes in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..clusters.cluster import Cluster
from ..clusters.joined import cluster_around
from ..graph.op_graph import OpGraph
from ..methods.batch_dims import dims_by_tensor
from ..methods.dim_names import Dim, DimTies
from ..methods.layout_rules import (
    LayoutRules,
    given_names,
    names_by_tensor,
    restriction_of_names,
)
from ..methods.megatron_restriction import MegatronDims, megatron_dims
from ..methods.named_methods import Megatron
from ..methods.restrictions import Demand, Restriction, States
from ..options import Options
from ..planner.step_variants import is_movable, nothing_to_offload
from ..planner.whole_step import donated_by_name
from ..plans.staged_plan import stages_of
from ..sharding.layouts import FREE
from ..sharding.mesh import MeshShape
from ..sharding.pins import (
    PLACED,
    Pin,
    check_matched,
    is_matched,
    is_path,
    keys_of_paths,
    resolve_pins,
)
from ..state.array_chunks import chunk_shardings
from ..state.placements import LeafPart, is_like, placed_pins, placement_pins
from .cut_step import CutStep, remat_of
from .step_parts import StepParts


@dataclass(frozen=True, eq=False)
class StageDemands:
    """What is asked of the programs of stages; all sequences are by stage.

    `kept` are leaves whose buffers are not reused, `host` slots in the host's memory.
    State of the stages in `split` lies in as many parts as they have devices. `remat`
    is what backward programs make again. `devices` are counted from the first of the
    cluster, where they are known.
    """

    shapes: Sequence[MeshShape]
    clusters: Sequence[Cluster]
    devices: Sequence[range]
    pins: StagePins
    kept: frozenset[str]
    host: frozenset[str]
    split: frozenset[int]
    remat: str
    inside: StageInside | None  # where it has a name
    rules: StageRules | None

    def restrictions(
        self, part: OpGraph, mesh: MeshShape, settled: Collection[int] = ()
    ) -> list[Restriction]:
        """What the inside of stages and layout rules leave; see `StageRules`."""
        found = [] if self.inside is None else [self.inside.restriction(part, mesh)]
        if self.rules is not None:
            found.append(self.rules.restriction(part, mesh, settled))
        return found


def stage_demands(
    made: CutStep,
    leaves: Sequence[Any],
    options: Options,
    shapes: Sequence[MeshShape],
    devices: Sequence[range] = (),
    split: Collection[int] = (),
    inside: Megatron | None = None,
) -> StageDemands:
    """What is asked of the programs of a cut step, whose arguments are `leaves`.

    `shapes` and `devices` are by stage.

    Raises:
      ValueError: a pin is found nowhere, or there is nothing to offload.
    """
    cluster, parts = options.cluster or Cluster.local(), made.parts
    chunked, whole = made.chunked, made.whole
    by_path = dict(zip(whole.input_paths, leaves, strict=True))
    paths = chunked.traced.input_paths
    read_only = {
        path: by_path[path]
        for path, output in zip(paths, chunked.roles.next_output, strict=True)
        if output is None and path in by_path
    }
    shardings = {
        path: sharding
        for leaf, own in chunked.chunks_by_path(whole).items()
        for path, sharding in zip(
            own, chunk_shardings(by_path.get(leaf), len(own)), strict=True
        )
        if isinstance(sharding, NamedSharding)
    }
    kept = frozenset[str]()
    if options.donate_argnums != "auto":
        donated = donated_by_name(whole, options)
        chunks = chunked.chunks_by_path(whole).values()
        kept = frozenset(
            path for i, own in enumerate(chunks) if i not in donated for path in own
        )
    rules = None
    if options.rules is not None:
        names = chunked.by_chunk(options.rules.names or {}, whole)
        rules = StageRules(replace(options.rules, names=names), parts)
    graph = parts.microbatch
    return StageDemands(
        shapes,
        [cluster_around(cluster, each.start, len(each)) for each in devices]
        or [cluster] * len(shapes),
        devices,
        StagePins.checked(
            chunked.by_chunk(options.pins, whole), paths, read_only, shardings
        ),
        kept,
        frozenset(_at_host(made, options)),
        frozenset(split),
        str(remat_of(options) or ""),
        None
        if inside is None
        else StageInside.of(inside, graph, parts.held, parts.batch, shapes[0]),
        rules,
    )


def _at_host(made: CutStep, options: Options) -> Collection[str]:
    """Paths of the state that the host keeps, as `offload` or the plan given says.

    Raises:
      ValueError: there is none.
    """
    if options.plan is not None:
        programs = stages_of(options.plan).programs
        planned = (each for one in programs for each in one.sharding.inputs)
        return {each.path for each in planned if each.memory == "host"}
    if options.offload in (None, "auto"):
        return ()
    update, home = made.parts.apply, made.apply.home
    inputs = made.parts.microbatch.inputs
    read = {each.path for each in inputs if each.tensor in made.cut.home}
    state = {
        i.path
        for i in update.inputs
        if i.output is not None
        and i.tensor in home
        and is_movable(update, i.tensor)
        and (options.offload == "state" or i.path not in read)
    }
    if not state and options.offload == "optimizer_state":
        raise ValueError(nothing_to_offload(made.whole.name))
    return state


@dataclass(frozen=True)
class StagePins:
    """Pins of the step's arguments, by path or expression, and leaves that stay.

    `read_only` are leaves that no step updates, by path: they are taken from where they
    lie, if that is on such a mesh. `placed` are those that a pin keeps where they lie,
    whose specs are among the pins.
    """

    pins: Mapping[str, PartitionSpec]
    of_paths: frozenset[str]  # those pins that are paths themselves
    read_only: Mapping[str, Any]
    placed: Mapping[str, NamedSharding] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        pins: Mapping[str, PartitionSpec],
        paths: Sequence[str],
        read_only: Mapping[str, Any],
        shardings: Mapping[str, NamedSharding],
    ) -> StagePins:
        """Pins of which each is found in `paths`.

        `shardings` are those of the arrays, by path, where they have one.

        Raises:
          ValueError: a pin is found nowhere, or is to stay and lies on no mesh.
        """
        check_matched(pins, paths)
        lying = [shardings.get(path) for path in paths]
        leaves = [each and LeafPart(each) for each in lying]
        found = placed_pins(pins, paths, leaves, None)
        placed = {
            path: shardings[path]
            for path, key in keys_of_paths(pins, paths).items()
            if pins[key] == PLACED and path in shardings
        }
        of_paths = frozenset(key for key in found if is_path(key, paths))
        return cls(found, of_paths, read_only, placed)

    def of_program(self, graph: OpGraph, mesh: MeshShape) -> dict[int, Pin]:
        """The pins of a stage program on its mesh, by tensor.

        What a stage reads of another stage's leaf is not pinned where the mesh has not
        all axes that the pin names.
        """
        paths = [i.path for i in graph.inputs]
        axes = {*mesh.axis_names}
        mine = {k: v for k, v in self._found_in(paths).items() if _axes_of(v) <= axes}
        leaves = [self.read_only.get(path) for path in paths]
        return {
            **placement_pins(leaves, graph, mesh),
            **resolve_pins(mine, graph, mesh),
        }

    def check_stages(
        self,
        stages_of: Mapping[str, Sequence[int]],
        shapes: Sequence[MeshShape],
        devices: Sequence[range],
    ) -> None:
        """Does nothing if every pin can be kept on a stage that has its leaf.

        Arguments:
          stages_of: the stages of each leaf, by path: one for state, which lives there,
            and for examples all that read them.
          shapes: the mesh of each stage.
          devices: the devices of each stage, counted from the first of the cluster; of
            no stage, if they are not known.

        Raises:
          ValueError: a pin names axes of other stages, or a leaf lies there.
        """
        for path, sharding in self.placed.items():
            for stage in stages_of.get(path, ())[:1]:
                _check_placed(path, sharding, stage, shapes, devices)
        found = self._found_in([*stages_of])
        for path, key in keys_of_paths(found, [*stages_of]).items():
            axes, stages = _axes_of(self.pins[key]), stages_of[path]
            if not any(axes <= {*shapes[stage].axis_names} for stage in stages):
                raise ValueError(
                    f"A leaf lives on one stage, so its pin may name axes of that "
                    f"stage's mesh alone, but the pin {key!r} of {path} is "
                    f"{self.pins[key]}, and {path} is on stage {stages[0]}, whose mesh "
                    f"is {shapes[stages[0]]}; name axes of that mesh, or move the leaf "
                    f"to another stage with PipelineParallel(stage_products=...)."
                )

    def _found_in(self, paths: Sequence[str]) -> dict[str, PartitionSpec]:
        """The pins of some of the leaves."""
        return {
            key: spec
            for key, spec in self.pins.items()
            if is_path(key, paths)
            or (key not in self.of_paths and is_matched(key, paths))
        }


def _check_placed(
    path: str,
    sharding: NamedSharding,
    stage: int,
    shapes: Sequence[MeshShape],
    devices: Sequence[range],
) -> None:
    """Does nothing if an array lies on the mesh of its stage.

    Raises:
      ValueError: it lies on another mesh, or on devices of other stages.
    """
    position = {device: i for i, device in enumerate(jax.devices())}
    held: set[int] = set()
    if isinstance(sharding.mesh, Mesh):  # those of remote devices are not known
        held = {position[each] for each in sharding.device_set if each in position}
    is_here = not held or not devices or held <= {*devices[stage]}
    if is_like(sharding, shapes[stage]) and is_here:
        return
    sizes = ";".join(f"{name}:{size}" for name, size in sharding.mesh.shape.items())
    raise ValueError(
        f"A leaf lives on one stage, so a pin {PLACED!r} must be for an array on the "
        f"mesh of that stage, but {path} is on stage {stage}, whose mesh is "
        f"{shapes[stage]}, and its array lies on {sizes} of devices {sorted(held)}; "
        f"leave the pin out, which moves it there, or move the leaf to another stage "
        f"with PipelineParallel(stage_products=...)."
    )


def _axes_of(spec: object) -> frozenset[str]:
    """The mesh axes that a pin names; of what is no spec, none."""
    if not isinstance(spec, PartitionSpec):
        return frozenset()
    entries = [each for each in spec if each is not None and each is not FREE]
    return frozenset(
        name
        for each in entries
        for name in ((each,) if isinstance(each, str) else each)
    )


_DimsBySlot = Mapping[str, frozenset[int]]


@dataclass(frozen=True, eq=False)
class StageInside:
    """The dims of every slot that stages split, by what they split them over.

    `first` is the first of the mesh axes that hold a group.
    """

    name: str
    num_parts: int
    first: int
    batch: _DimsBySlot
    split: _DimsBySlot
    between: _DimsBySlot

    @classmethod
    def of(
        cls,
        method: Megatron,
        graph: OpGraph,
        held: Collection[str],
        batch: Collection[str],
        mesh: MeshShape,
    ) -> StageInside:
        """The dims in a microbatch; `held` are paths of state, `batch` of examples.

        Raises:
          ValueError: the mesh or the microbatch does not fit the method.
          NotImplementedError: as for `Megatron`.
        """
        inputs = (
            replace(i, role="state" if i.path in held else "batch")
            for i in graph.inputs
        )
        graph = replace(graph, inputs=tuple(inputs))
        name = f"Megatron(tensor={method.tensor})"
        dims = megatron_dims(
            *(name, method.tensor, graph, mesh),
            [i.tensor for i in graph.inputs if i.path in batch],
            sequence=method.sequence,
        )

        def by_slot(found: Mapping[int, frozenset[int]]) -> _DimsBySlot:
            made = {t.name: found[t.index] for t in graph.tensors if t.index in found}
            for path, operand in zip(graph.output_paths, graph.outputs, strict=True):
                if isinstance(operand, int) and operand in found:
                    made[path] = found[operand]
            return made

        return cls(
            *(name, method.tensor, dims.first),
            *(by_slot(dims.batch), by_slot(dims.split), by_slot(dims.between)),
        )

    def restriction(self, part: OpGraph, mesh: MeshShape) -> Restriction:
        """What the program of a stage leaves to the solver; it takes slots."""
        ties = DimTies.of(part, mesh)

        def reached(slots: _DimsBySlot, parts: int) -> dict[int, frozenset[int]]:
            origins: list[Dim] = [
                (i.tensor, dim) for i in part.inputs for dim in slots.get(i.path, ())
            ]
            return dims_by_tensor(ties.reach(origins, parts))

        batch = reached(self.batch, prod(mesh.axis_sizes[: self.first]))
        split = reached(self.split, self.num_parts)
        whole = {i.tensor for i in part.inputs if i.path not in self.between}
        between = {
            tensor: dims
            for tensor, dims in reached(self.between, self.num_parts).items()
            if len(dims) == 1 and tensor not in whole
        }
        dims = MegatronDims(self.first, batch, split, between)
        found = dims.restriction(self.name, part, mesh)
        slots = [(i.path, i.tensor) for i in part.inputs]
        results = zip(part.output_paths, part.outputs, strict=True)
        return replace(
            found,
            homes=self._borders(slots, dims, mesh),
            returned=self._borders(
                [(path, t) for path, t in results if isinstance(t, int)], dims, mesh
            ),
        )

    def _borders(
        self, slots: list[tuple[str, int]], dims: MegatronDims, mesh: MeshShape
    ) -> dict[int, Demand]:
        """Between stages, too, what lies between layers is split by the sequence."""
        found: dict[int, Demand] = {}
        for path, tensor in slots:
            if path in self.between and tensor not in dims.split:
                data: States = dims.batch.get(tensor)
                inside = self.between[path]
                num_inside = mesh.num_axes - self.first
                found[tensor] = (data,) * self.first + (inside,) * num_inside
        return found


_NamesBySlot = dict[str, dict[int, str]]  # by dim


@dataclass(frozen=True, eq=False)
class StageRules:
    """The rules of a step that is cut; names of dims are by path of chunks."""

    rules: LayoutRules
    parts: StepParts
    _known: dict[MeshShape, _NamesBySlot] = field(default_factory=dict)

    def restriction(
        self, part: OpGraph, mesh: MeshShape, settled: Collection[int]
    ) -> Restriction:
        """What the program of a stage leaves to the solver; it takes slots.

        `settled` are arguments that lie as programs of the stage before it have them.

        Raises:
          ValueError: see `LayoutRules`.
        """
        names = _at_inputs(part, self._slots(mesh))
        rules = self.rules.only({*names.values()})
        found = restriction_of_names(rules, part, mesh, names, others_whole=False)
        homes = {tensor: (None,) * mesh.num_axes for tensor in settled}
        return replace(found, name=str(self.rules), homes=homes)

    def _slots(self, mesh: MeshShape) -> _NamesBySlot:
        """The names of what programs take from outside or from each other."""
        if mesh not in self._known:
            self._known[mesh] = self._spread(mesh)
        return self._known[mesh]

    def _spread(self, mesh: MeshShape) -> _NamesBySlot:
        microbatch, update = self.parts.microbatch, self.parts.apply
        batch = [i.tensor for i in microbatch.inputs if i.path in self.parts.batch]
        names = dict(given_names(self.rules, microbatch, batch))
        rules, leaves = self.rules, {*self.parts.held, *self.parts.sums}
        while True:
            found = names_by_tensor(rules, microbatch, mesh, names)
            slots = _by_slot(microbatch, found, "again ")
            ends = {slot: slots[slot] for slot in leaves & slots.keys()}
            of_leaves = _at_inputs(update, ends)
            rules = self.rules.only({*of_leaves.values()})
            found = names_by_tensor(rules, update, mesh, of_leaves)
            later = _by_slot(update, found, "apply ")
            more = {slot: later[slot] for slot in leaves & later.keys()}
            both = {**names, **_at_inputs(microbatch, more)}
            if both == names or ends == more:
                return {**later, **slots, **more}
            names, rules = both, self.rules


def _at_inputs(
    graph: OpGraph, slots: Mapping[str, Mapping[int, str]]
) -> dict[Dim, str]:
    """The names of the dims of a graph's inputs, from those of their slots."""
    return {
        (i.tensor, dim): name
        for i in graph.inputs
        for dim, name in slots.get(i.path, {}).items()
    }


def _by_slot(
    graph: OpGraph, found: Mapping[int, dict[int, str]], prefix: str
) -> _NamesBySlot:
    """Names by slot; what another program made has a prefix in some programs."""
    named = {t.name: found[t.index] for t in graph.tensors if t.index in found}
    named |= {f"{prefix}{name}": dims for name, dims in named.items()}
    for path, operand in zip(graph.output_paths, graph.outputs, strict=True):
        if isinstance(operand, int) and operand in found:
            named[path] = found[operand]
    return named
