"""Replays a compiled program: how long the target takes for the schedule it was given.

GPUs run the kernels of the entry computation one after the other, and collectives on a
stream of their own between their start and their end. A kernel takes the bytes of its
operands and results over the memory bandwidth, a product or a convolution what one of
its m, n and k takes, if that is longer, a collective what its links take. Of TPUs the
compiler says itself how many cycles a fusion takes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, cast

from ..clusters.ici import SLICES
from ..clusters.links import link_of_groups
from ..costs.collectives import collective_seconds
from ..costs.compute import ATTENTION_RATES
from ..sharding.collective import Groups, Surroundings, array_bytes
from .compiled_collectives import CompiledProgram
from .hlo_text import ARRAY, Instruction

if TYPE_CHECKING:
    from ..clusters.cluster import Cluster
    from ..sharding.collective import CollectiveKind
    from ..sharding.mesh import MeshShape

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id"
    " replica-id opt-barrier iota add-dependency domain".split()
)
_READ_IN_PART = frozenset(("dynamic-slice", "slice", "gather"))
# Of the bandwidth, which kernels of softmax and norms reach that XLA makes by Triton:
# on an H100 169 of them took 140 ms, where their bytes alone take 96.
_TRITON_FRACTION = 0.68
# Where an update is among the operands, and how often its bytes move.
_UPDATES = {"dynamic-update-slice": (1, 1), "scatter": (-1, 2)}
_FUSIONS = ("fusion", "fusion-start")
_SAME_BYTES = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
_CONVOLUTIONS = {
    "__cudnn$convForward": "forward",
    "__cudnn$convBiasActivationForward": "forward",
    "__cudnn$convForwardGraph": "forward",
    "__cudnn$convBackwardInput": "input",
    "__cudnn$convBackwardFilter": "filter",
}


@dataclass(frozen=True)
class Replay:
    """One step of a compiled program on one device, in seconds.

    Attributes:
      seconds: of the whole step.
      exposed_seconds: those in which nothing but communication runs.
      by_class: of kernels by what they are: products, convolutions, fused attention,
        other kernels, starting kernels, collectives (also those beside others), host
        transfers.
    """

    seconds: float
    exposed_seconds: float
    by_class: Mapping[str, float]


def replay(text: str, cluster: Cluster, mesh: MeshShape) -> Replay:
    """Replays optimized HLO, scheduled, that was compiled for a GPU or a TPU.

    Args:
      text: as `compiled.as_text()` returns it.
      cluster: what the program was compiled for.
      mesh: of the plan; its devices are the program's.
    """
    return _Replayer(CompiledProgram.parse(text), cluster, mesh).run()


def replay_if_known(
    text: str, cluster: Cluster | None, mesh: MeshShape | None
) -> Replay | None:
    """As `replay`; None where the devices are not known, and of CPUs."""
    if cluster is None or mesh is None or cluster.device.kind == "CPU":
        return None
    return replay(text, cluster, mesh)


@dataclass
class _Timeline:
    """Where the stream of kernels is, and the one of what is sent."""

    now: float = 0.0
    sent: float = 0.0
    exposed: float = 0.0
    by_class: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )
    ends: dict[str, float] = field(default_factory=dict)

    def run(self, kind: str, seconds: float) -> None:
        self.now += seconds
        self.by_class[kind] += seconds

    def send(self, kind: str, seconds: float) -> float:
        """Starts to send; returns when that ends."""
        self.sent = max(self.now, self.sent) + seconds
        self.by_class[kind] += seconds
        return self.sent

    def wait(self, end: float) -> None:
        self.exposed += max(end - self.now, 0.0)
        self.now = max(end, self.now)

    def add(self, other: _Timeline, times: int) -> None:
        """Runs what `other` ran, so many times."""
        self.now += times * other.now
        self.exposed += times * other.exposed
        for kind, seconds in other.by_class.items():
            self.by_class[kind] += times * seconds


@dataclass
class _Replayer:
    program: CompiledProgram
    cluster: Cluster
    mesh: MeshShape
    _types: dict[str, dict[str, str]] = field(default_factory=dict)

    def run(self) -> Replay:
        found = self._timeline(self.program.entry)
        return Replay(found.now, found.exposed, dict(found.by_class))

    def _timeline(self, name: str) -> _Timeline:
        line = _Timeline()
        for made in self.program.body(name):
            self._step(name, made, line)
        line.wait(line.sent)
        return line

    def _step(self, name: str, made: Instruction, line: _Timeline) -> None:
        opcode = made.opcode
        if opcode in _FREE or opcode.endswith("-update"):
            return
        if opcode.endswith("-done"):
            line.wait(line.ends.get(made.operands[0], 0.0))
        elif sent := list(self._sent(name, made)):
            for kind, seconds, is_async in sent:
                end = line.send(kind, seconds)
                line.ends[made.name] = end
                if not is_async:
                    line.wait(end)
            if self.program.is_tpu:
                line.run("kernels", self._cycle_seconds(made))
        elif opcode == "while":
            trips = self.program.trips(name, made)
            for called in (made.called_as("body"), made.called_as("condition")):
                line.add(self._timeline(called), 1 if trips is None else trips)
        elif opcode in ("call", "conditional", "async-start"):
            inside = [self._timeline(called) for called in made.called]
            line.add(max(inside, key=lambda each: each.now, default=_Timeline()), 1)
        elif self.program.is_tpu:
            line.run("kernels", self._cycle_seconds(made))
        else:
            line.run("launches", self.cluster.kernel_seconds)
            line.run(*self._kernel(name, made))

    def _cycle_seconds(self, made: Instruction) -> float:
        clock_rate = SLICES[self.cluster.device.kind].clock_rate
        return made.estimated_cycles / clock_rate

    def _sent(self, name: str, made: Instruction) -> Iterator[tuple[str, float, bool]]:
        """The class and seconds of what an instruction sends, and if others run."""
        if made.opcode == "copy-start" and "S(5)" in made.result:
            moved = _bytes(made.result) / 2
            rate = self.cluster.device.host_memory_bandwidth
            yield "host transfers", moved / rate, True
            return
        if made.is_continued:
            return
        if made.collective_kind:
            found = self.program.collectives_of(name, made, Surroundings())
        elif self.program.is_tpu and made.opcode == "fusion":
            found = (
                c for n in made.called for c in self.program.walk(n, Surroundings())
            )
        else:
            return
        # What is combined is one operation.
        whole: dict[tuple[str, Groups, bool], float] = {}
        for each in found:
            key = each.kind, each.groups, each.is_async
            whole[key] = whole.get(key, 0.0) + each.bytes
        for (kind, groups, is_async), num_bytes in whole.items():
            yield "collectives", self._collective(kind, groups, num_bytes), is_async

    def _collective(self, kind: str, groups: Groups, num_bytes: float) -> float:
        if kind == "collective_permute":
            groups = _chains(groups)
        if max(map(len, groups)) == 1:
            return 0.0
        known = "all_gather" if kind == "collective_broadcast" else kind
        link = link_of_groups(self.cluster, groups, self.mesh.axis_sizes)
        kind_known = cast("CollectiveKind", known)
        return float(collective_seconds(kind_known, num_bytes, link))

    # Kernels of GPUs.

    def _kernel(self, name: str, made: Instruction) -> tuple[str, float]:
        """What a kernel is, and its seconds."""
        device = self.cluster.device
        rate = device.bytes_per_second
        if '"kind":"__triton"' in made.rest:
            rate *= _TRITON_FRACTION
        memory = self._moved_bytes(name, made) / rate
        kind, compute = "kernels", 0.0
        inside = [(name, made)]
        if made.opcode in _FUSIONS:
            called = made.called_as("calls")
            inside = [(called, each) for each in self.program.body(called)]
        for around, each in inside:
            found = self._product(around, each)
            if found:
                kind, dtype, sizes = found
                compute += device.product_seconds(dtype, *sizes)
        if "__cudnn$fmha" in made.rest:
            (element, queries), *_ = _arrays(self._operand_types(name, made)[0])
            flops = _attention_flops(made, prod(queries))
            reached = device.flops_per_second(array_bytes(element, ())[0])
            kind, compute = "attention", float(flops / reached)
        return kind, max(memory, compute)

    def _product(
        self, name: str, made: Instruction
    ) -> tuple[str, str, tuple[int, int, int, int]] | None:
        """Class, dtype and batch, m, n, k of a product or a convolution."""
        target = re.search(r'custom_call_target="([^"]*)"', made.rest)
        if made.opcode == "dot" or (target and target[1].startswith("__cublas")):
            types = self._operand_types(name, made)
            return "products", *_sizes_of_product(made, types)
        if made.opcode == "convolution" or (target and target[1] in _CONVOLUTIONS):
            role = _CONVOLUTIONS[target[1]] if target else "forward"
            types = self._operand_types(name, made)
            return "convolutions", *_sizes_of_convolution(made, types, role)
        return None

    def _moved_bytes(self, name: str, made: Instruction) -> float:
        """Bytes that a kernel reads and writes.

        Of an operand of which slices are read, those; of one that is updated in place,
        the update.
        """
        operands = self._operand_types(name, made)
        if made.opcode not in _FUSIONS:
            return _bytes_alone(made, operands)
        called = made.called_as("calls")
        body = self.program.body(called)
        needed = self._needed(called)
        given = (each for each in body if each.opcode == "parameter")
        read = {int(m.rest.split(")")[0]): needed.get(m.name, 0.0) for m in given}
        parts = (_bytes(t) * read.get(at, 1.0) for at, t in enumerate(operands))
        return sum(parts) + self._written(called)

    def _needed(self, name: str) -> Mapping[str, float]:
        """Of each value of a fused computation, the part that its result is made of."""
        body = self.program.body(name)
        sizes = {made.name: _bytes(made.result) for made in body}
        needed = {body[-1].name: 1.0}
        for made in reversed(body):
            own = needed.get(made.name, 0.0)
            for position, operand in enumerate(made.operands):
                part, known = own, needed.get(operand, 0.0)
                if position == 0 and made.opcode in _READ_IN_PART:
                    part = known + own * sizes[made.name] / max(sizes[operand], 1.0)
                elif position == 0 and made.opcode in _UPDATES:
                    part = 0.0
                elif made.opcode == "broadcast":
                    part = float(own > 0.0)
                needed[operand] = min(max(known, part), 1.0)
        return needed

    def _written(self, name: str) -> float:
        """Bytes that a fused computation writes."""
        body = {each.name: each for each in self.program.body(name)}
        root = self.program.body(name)[-1]
        roots = root.operands if root.opcode == "tuple" else (root.name,)
        total = 0.0
        for each in map(body.__getitem__, roots):
            made = _behind(each, body)
            update = _UPDATES.get(made.opcode)
            base = update and _behind(body[made.operands[0]], body)
            if update and base and base.opcode == "parameter":
                at, times = update
                total += times * _bytes(body[made.operands[at]].result)
            else:
                total += _bytes(each.result)
        return total

    def _operand_types(self, name: str, made: Instruction) -> list[str]:
        if name not in self._types:
            self._types[name] = {m.name: m.result for m in self.program.body(name)}
        return [self._types[name].get(operand, "") for operand in made.operands]


def _behind(made: Instruction, body: Mapping[str, Instruction]) -> Instruction:
    """What makes the elements of a value, in whatever form."""
    while made.opcode in _SAME_BYTES:
        made = body[made.operands[0]]
    return made


def _bytes_alone(made: Instruction, operands: Sequence[str]) -> float:
    """Bytes that a kernel of one operation moves."""
    if made.opcode in _READ_IN_PART:
        return 2 * _bytes(made.result)
    if made.opcode in _UPDATES:
        at, times = _UPDATES[made.opcode]
        return (1 + times) * _bytes(operands[at])
    return sum(map(_bytes, operands)) + _bytes(made.result)


def _arrays(result: str) -> list[tuple[str, list[int]]]:
    """Element type and dims of each array of a type, without workspaces."""
    found = [
        (element, [int(size.removeprefix("<=")) for size in dims.split(",") if size])
        for element, dims in ARRAY.findall(result)
    ]
    is_workspace = result.startswith("(") and found and found[-1][0] == "s8"
    return found[:-1] if is_workspace else found


def _bytes(result: str) -> float:
    known = (each for each in _arrays(result) if each[0] != "token")
    return float(sum(array_bytes(*each)[1] for each in known))


def _numbers(made: Instruction, name: str) -> list[int]:
    """The dims that an attribute of a product lists, in either spelling."""
    found = re.search(rf'{name}_dim(?:s|ensions)"?[=:][\[{{]([^\]}}]*)', made.rest)
    return [int(each) for each in re.findall(r"\d+", found[1])] if found else []


def _sizes_of_product(
    made: Instruction, operands: Sequence[str]
) -> tuple[str, tuple[int, int, int, int]]:
    (element, left), (_, right) = (_arrays(each)[0] for each in operands[:2])
    depth = prod(left[dim] for dim in _numbers(made, "lhs_contracting"))
    batch = prod(left[dim] for dim in _numbers(made, "lhs_batch"))
    sizes = prod(left) // (batch * depth), prod(right) // (batch * depth)
    return array_bytes(element, ())[0], (batch, *sizes, depth)


def _attention_flops(made: Instruction, num_queries: int) -> float:
    """Of cuDNN's attention, at the rate of products: more of them at its own.

    `num_queries` are the numbers of all queries.
    """
    is_backward = "Backward" in made.rest.partition("__cudnn$fmha")[2][:24]
    shape = made.rest.partition("intermediate_tensor_shape")[2]
    dims = re.search(r'"dimensions": ?\[([^\]]*)\]', shape)
    assert dims, made.rest
    *rows, keys = map(int, re.findall(r"\d+", dims[1]))
    products = (5 if is_backward else 2) * num_queries * keys
    is_masked = '"mask_type": "CAUSAL"' in made.rest and rows[-1] == keys
    return 2.0 * products / (1 + is_masked) / ATTENTION_RATES[is_backward]


def _sizes_of_convolution(
    made: Instruction, operands: Sequence[str], role: str
) -> tuple[str, tuple[int, int, int, int]]:
    """Of the matrix product that a convolution, or one of its gradients, stands for."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", made.rest)
    assert labels, made.rest
    (element, left), (_, right) = (_arrays(each)[0] for each in operands[:2])
    result = _arrays(made.result)[0][1]
    image, kernel, output = {
        "forward": (left, right, result),
        "input": (result, right, left),
        "filter": (left, result, right),
    }[role]
    known = re.search(r"feature_group_count=(\d+)", made.rest)
    groups = int(known[1]) if known else 1
    features = kernel[labels[2].index("o")]
    window = prod(kernel) // features
    positions = prod(output) // features
    features //= groups
    sizes = {
        "forward": (positions, features, window),
        "input": (
            prod(image) // image[labels[1].index("f")],
            kernel[labels[2].index("i")],
            0,
        ),
        # On an H100 gradients of filters take twice what the others do.
        "filter": (window, features, 2 * positions),
    }[role]
    if role == "input":
        depth = positions * features * window // max(sizes[0] * sizes[1], 1)
        sizes = (*sizes[:2], max(depth, 1))
    return array_bytes(element, ())[0], (groups, *sizes)


def _chains(pairs: Groups) -> Groups:
    """The devices that pairs of a permutation join, longest first.

    Shorter chains have their last device again: they are of equal length.
    """
    of = {device: {device} for pair in pairs for device in pair}
    for source, target in pairs:
        if of[source] is not of[target]:
            of[source] |= of[target]
            of.update(dict.fromkeys(of[target], of[source]))
    chains = sorted(map(sorted, {id(s): s for s in of.values()}.values()), key=len)
    most = len(chains[-1])
    return tuple((*each, *each[-1:] * (most - len(each))) for each in reversed(chains))
