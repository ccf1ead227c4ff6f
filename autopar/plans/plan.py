"""The plan of one function on one mesh: data only, complete enough to lower and audit.

Every entry carries the stable name of what it plans. The plan holds no JAX object, so
it is printed, compared and saved as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from ..graph.op_graph import MemoryKind, Role
from ..sharding.collective import Collective
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec

Padding = tuple[tuple[int, int], ...]  # sizes of dims, and what they are padded to
# Where weights have tasks of their own, backward makes the cotangents that others wait
# for, and weight the rest of the backward work.
TaskKind = Literal["forward", "backward", "weight", "apply"]


@dataclass(frozen=True)
class OperatorPlan:
    """How one operator runs: the factor each mesh axis splits, and the specs it needs.

    `seconds` is the predicted compute time of a step, all its executions together.
    """

    name: str
    kind: str
    source: str
    factors: tuple[str, ...]
    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
    flops: float
    split: int  # over how many devices the work is divided
    seconds: float


@dataclass(frozen=True)
class Conversion:
    """A copy of a tensor in another spec, made once from one that exists."""

    source: Spec
    target: Spec


@dataclass(frozen=True)
class TensorPlan:
    """The spec a tensor is made in, and its copies in the order they can be made."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: int
    spec: Spec
    conversions: tuple[Conversion, ...] = ()


@dataclass(frozen=True)
class InputPlan:
    """An argument leaf (or closed-over array): its path, role and home.

    What has its home in the host's `memory` is brought to the device for the update,
    and its next value sent back.
    """

    path: str
    role: Role
    spec: Spec
    shape: tuple[int, ...]
    bytes: int
    memory: MemoryKind = "device"


@dataclass(frozen=True)
class Prediction:
    """What the plan and the cost model say, before anything is lowered.

    Seconds are of one step; bytes are per device. `collective_bytes` are HLO result
    bytes. `optimality_gap` is relative, against a bound of the full problem; of a
    pipeline, against that of the search for its stages, whose costs are its layers', or
    of the problems of stages that were given. Memory may be whatever it is there.
    `budget_bytes` is what `peak_bytes` had to fit, 0 without a budget;
    `memory_correction` the error of the memory model, as compiling plans of this
    function showed it, by which `peak_bytes` is corrected. `host_seconds` is what
    moving state between host and device takes, `host_bytes` what the host holds of it.
    """

    step_seconds: float
    compute_seconds: float
    collective_seconds: float
    collective_bytes: int
    peak_bytes: int
    bubble_fraction: float
    optimality_gap: float
    split_flops_fraction: float
    budget_bytes: int = 0
    memory_correction: float = 1.0
    host_seconds: float = 0.0
    host_bytes: int = 0

    @property
    def gap_words(self) -> str:
        """How far the optimum may be, or what fits."""
        if not self.step_seconds:
            return "none: the step takes no time"
        if not isfinite(self.optimality_gap):
            return "no bound is known"
        return f"at most {self.optimality_gap:.3%} from the optimum"


@dataclass(frozen=True)
class TriedPlan:
    """Another plan of a step that was made, with what it takes."""

    title: str
    predicted: Prediction

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.predicted.step_seconds


@dataclass(frozen=True)
class ShardingPlan:
    """The decision for a whole function.

    `operators` are in the graph's order, `tensors` by tensor index; `outputs` has, for
    each block, the spec in which it returns each of its outputs. `remat` says what the
    backward pass of the step makes again, as `Remat` prints; "" if nothing.
    `device_kind` is that of the cluster's devices, "" where it is not known. `padding`
    is what examples are padded by that the devices do not divide. `tried` are other
    plans that were made on the way; they are not in files.
    """

    function: str
    mesh: MeshShape
    cluster: str
    inputs: Sequence[InputPlan]
    operators: Sequence[OperatorPlan]
    tensors: Sequence[TensorPlan]
    outputs: tuple[tuple[Spec, ...], ...]
    trip_counts: tuple[int, ...]  # executions a step, by block
    collectives: Sequence[Collective]
    predicted: Prediction
    remat: str = ""
    device_kind: str = ""
    padding: Padding = ()
    tried: tuple[TriedPlan, ...] = field(default=(), repr=False, compare=False)

    def state_bytes(self) -> int:
        """Bytes of state on one device, without what lies in the host's memory."""
        state = (i for i in self.inputs if i.role == "state")
        return sum(i.bytes for i in state if i.memory == "device")

    def padding_words(self) -> str:
        """Which sizes are padded and what it costs; empty if none is."""
        return ", ".join(
            f"{size:,} padded to {padded:,} ({padded / size - 1:.1%} more work)"
            for size, padded in self.padding
        )

    def host_bytes(self) -> int:
        """Bytes of state that the host holds for one device."""
        return sum(i.bytes for i in self.inputs if i.memory == "host")


def total_bytes(collectives: Sequence[Collective]) -> int:
    """Per-device result bytes of a step."""
    return sum(collective.total_bytes for collective in collectives)


@dataclass(frozen=True)
class MemoryShares:
    """What a device holds at the peak, by kind and by source line.

    Both are in bytes and add up to the plan's `peak_bytes`.
    """

    kinds: tuple[tuple[str, int], ...]
    lines: tuple[tuple[str, int], ...]
