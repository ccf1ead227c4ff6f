"""Named strategies: the same solver, left with the plans that have a name.

Each is a restriction of where tensors lie, found from the roles of arguments and from
dims that are split together; how operators run, what is reduced when, and what cannot
be told from the name is the solver's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..graph.op_graph import OpGraph
from ..option_values import MicrobatchSemantics
from ..sharding.mesh import MeshShape
from .batch_dims import BatchDims
from .layout_rules import LayoutRules, layout_restriction
from .megatron_restriction import megatron_restriction
from .restrictions import Restriction
from .zero_restriction import zero_restriction


@dataclass(frozen=True)
class DataParallel:
    """Every device has all parameters and its part of the batch.

    The batch is split over every mesh axis, state is whole, and gradients are summed
    once: 2 (n-1)/n elements are sent for each parameter.

    Args:
      num_microbatches: as for `autopar.ShardParallel`.
      microbatch_semantics: as for `autopar.ShardParallel`.
    """

    num_microbatches: int = 1
    microbatch_semantics: MicrobatchSemantics = "exact"


@dataclass(frozen=True)
class Zero:
    """Data parallelism whose state is split too (ZeRO, 1910.02054; FSDP is stage 3).

    What no mesh axis divides stays whole. Parameters are the state that work on
    examples reads; all other state is the optimizer's.

    Args:
      stage: 1 splits the optimizer's state; 2 the gradients too, also those that are
        added up over microbatches; 3 the parameters too, which are gathered layer by
        layer where they are used.
      reshard_after_forward: of stage 3, as in FSDP: drop what was gathered for the
        forward pass and gather it again for the backward pass, 3 (n-1)/n elements for
        each parameter; or keep it, 2 (n-1)/n, and all parameters whole in between.
      num_microbatches: as for `autopar.ShardParallel`.
      microbatch_semantics: as for `autopar.ShardParallel`.

    Raises:
      ValueError: another stage, or parameters to keep whole that are not split.
    """

    stage: int
    num_microbatches: int = 1
    microbatch_semantics: MicrobatchSemantics = "exact"
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ValueError(
                f"ZeRO has stages 1 (optimizer state), 2 (gradients) and 3 "
                f"(parameters), but got {self.stage!r}."
            )
        if self.stage != 3 and not self.reshard_after_forward:
            raise ValueError(
                f"`reshard_after_forward` is of parameters that are split, as in "
                f"stage 3, but got stage {self.stage}; leave it out."
            )


@dataclass(frozen=True)
class Megatron:
    """Data parallelism between groups of devices, tensor parallelism in each.

    Within a group, layers are split by columns and then by rows: by the inner dim of an
    MLP, the heads of an attention, the words of a vocabulary. Which dims these are is
    found from the operators that share them (`megatron_restriction.py`).

    Args:
      tensor: devices in a group: the size of the last mesh axis, or the product of the
        last ones. Without a `mesh`, it is `data` by `tensor`.
      sequence: split what lies between those layers over the group too, by dim 1 of the
        batch, which cuts each all_reduce in two (sequence parallelism, 2205.05198).
      num_microbatches: as for `autopar.ShardParallel`.
      microbatch_semantics: as for `autopar.ShardParallel`.

    Raises:
      ValueError: `tensor` is no whole number from 1 up.
      NotImplementedError: when the step is planned: dim 1 of the batch is not a dim of
        what lies between the layers, or is not found to be.
    """

    tensor: int
    sequence: bool = False
    num_microbatches: int = 1
    microbatch_semantics: MicrobatchSemantics = "exact"

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, int) or self.tensor < 1:
            raise ValueError(
                f"`tensor` must be a number of devices from 1 up, but got "
                f"{self.tensor!r}."
            )

    def mesh(self, num_devices: int) -> MeshShape:
        """The mesh where none is given.

        Raises:
          ValueError: the devices are no multiple of a group.
        """
        if num_devices % self.tensor:
            raise ValueError(
                f"`tensor` must divide the number of devices, but {_name(self)} has "
                f"{num_devices}; use another number, or give a `mesh`."
            )
        if num_devices == self.tensor:
            return MeshShape(("tensor",), (self.tensor,))
        sizes = num_devices // self.tensor, self.tensor
        return MeshShape(("data", "tensor"), sizes)


@dataclass(frozen=True)
class ThreeD:
    """Data, tensor and pipeline parallelism by their sizes (Narayanan et al. 2021).

    What a stage does is split as by `Megatron`: parts of the batch between groups of
    `tensor` devices, layers within each.

    Args:
      data: groups of devices that share out the batch.
      tensor: devices in a group.
      pipeline: stages, each on `data` times `tensor` devices, scheduled as 1F1B.
      sequence: as for `autopar.Megatron`.
      num_microbatches: as for `autopar.ShardParallel`.
      microbatch_semantics: as for `autopar.ShardParallel`.

    Raises:
      ValueError: a size is no whole number from 1 up.
    """

    data: int
    tensor: int
    pipeline: int = 1
    sequence: bool = False
    num_microbatches: int = 1
    microbatch_semantics: MicrobatchSemantics = "exact"

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"`{name}` must be a whole number from 1 up, but got {size!r}."
                )

    def mesh(self, num_devices: int) -> MeshShape:
        """The mesh where none is given.

        Raises:
          ValueError: there are other devices than `data` times `tensor`.
        """
        if num_devices != self.data * self.tensor:
            raise ValueError(
                f"`data` times `tensor` must be the number of devices, but "
                f"{_name(self)} has {num_devices}; use other sizes."
            )
        return MeshShape(("data", "tensor"), (self.data, self.tensor))


NamedMethod = DataParallel | Zero | Megatron | ThreeD | LayoutRules
NAMED_METHODS = (DataParallel, Zero, Megatron, ThreeD, LayoutRules)


def _name(method: NamedMethod) -> str:
    """A method as its user wrote it: without what was left out."""
    given = [
        f"{each.name}={value!r}"
        for each in fields(method)
        if (value := getattr(method, each.name)) != each.default
    ]
    return f"{type(method).__name__}({', '.join(given)})"


def restriction_of(
    method: NamedMethod, graph: OpGraph, mesh: MeshShape, batch: Sequence[int]
) -> Restriction:
    """What a method leaves to the solver.

    Args:
      method: the method.
      graph: the step.
      mesh: has the axes.
      batch: the tensors whose dim 0 is the batch.

    Raises:
      ValueError: the mesh or the batch does not fit the method.
    """
    if isinstance(method, LayoutRules):
        if method.is_auto:
            raise NotImplementedError(
                "What else a layout that is found could be is not there yet "
                "(docs/roadmap.md); plan with its rules, which are logged, as method="
                "autopar.LayoutRules('batch:...')."
            )
        return layout_restriction(method, graph, mesh, batch, others_whole=True)
    if isinstance(method, Megatron | ThreeD):
        return megatron_restriction(
            _name(method), method.tensor, graph, mesh, batch, sequence=method.sequence
        )
    axes = range(mesh.num_axes)
    work = BatchDims.of(_name(method), graph, mesh, batch, axes)
    if isinstance(method, Zero):
        return zero_restriction(
            _name(method), method.stage, work, keeps=not method.reshard_after_forward
        )
    everywhere = {
        tensor.index: tuple(work.states(tensor.index, axis) for axis in axes)
        for tensor in graph.tensors
    }
    return Restriction(_name(method), everywhere, {}, {})


def gathers_again(method: object) -> bool:
    """Whether a method asks for parameters to be gathered in both passes."""
    return (
        isinstance(method, Zero) and method.stage == 3 and method.reshard_after_forward
    )


def restrictions_of(
    method: object,
    rules: LayoutRules | None,
    graph: OpGraph,
    mesh: MeshShape,
    batch: Sequence[int],
) -> tuple[Restriction, ...]:
    """All that `method` and `rules` of `parallelize` leave to the solver.

    Arguments and errors are those of `restriction_of`; methods without a name of their
    own restrict nothing.
    """
    found = []
    if isinstance(method, NAMED_METHODS):
        found.append(restriction_of(method, graph, mesh, batch))
    if rules is not None:
        found.append(layout_restriction(rules, graph, mesh, batch, others_whole=False))
    return tuple(found)
