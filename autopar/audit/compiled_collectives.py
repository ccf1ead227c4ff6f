"""Reads the collectives out of a program's HLO text, as lowered or as compiled.

The text is cut into computations, which are walked from the entry through calls,
fusions, loops and branches; every collective found is reported with the product of the
known trip counts around it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import jax
import numpy as np

from autopar.audit.hlo_text import Instruction
from autopar.audit.loop_trips import TripReader
from autopar.sharding.collective import Collective, Surroundings, device_groups

_REDUCTIONS = {
    "add": "sum",
    "multiply": "product",
    "maximum": "max",
    "minimum": "min",
    "and": "and",
    "or": "or",
}
_RELEVANT = re.compile(
    r"all-|to-all|collective-|reduce-scatter|body=|to_apply=|calls=|_computations?="
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")


def collectives_in_compiled(text: str) -> tuple[Collective, ...]:
    """Returns the collectives of a program, in the order they are printed.

    A combined operation is reported as one collective per piece, an asynchronous pair
    once, a branch of a conditional as `conditional`, and what runs in a loop of unknown
    trip count once, as `unbounded`.

    Args:
      text: optimized HLO, as `compiled.as_text()` returns it, of any backend.

    Raises:
      ValueError: if the text has no entry computation, or spells groups or element
        types in an unknown way.
    """
    return tuple(CompiledProgram.parse(text).read())


def collectives_in_lowered(lowered: jax.stages.Lowered) -> tuple[Collective, ...]:
    """As `collectives_in_compiled`, of a program that no compiler has changed.

    Args:
      lowered: what `jax.jit(f).lower(...)` returned, for any platform.
    """
    return collectives_in_compiled(lowered.as_text("hlo", debug_info=True))


def collectives_on(num_devices: int, text: str) -> tuple[Collective, ...] | None:
    """As `collectives_in_compiled`; None for a part of the devices, a slice of TPUs.

    Each slice has a program, and what is between them is made of host transfers and
    groups inside slices, which is not followed.
    """
    program = CompiledProgram.parse(text)
    size = program.num_replicas * program.num_partitions
    return tuple(program.read()) if size >= num_devices else None


@dataclass(frozen=True)
class CompiledProgram:
    """The computations of one module by name, and the size of its device grid."""

    computations: Mapping[str, tuple[str, ...]]
    entry: str
    num_replicas: int
    num_partitions: int
    _bodies: dict[str, tuple[Instruction, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def parse(cls, text: str) -> "CompiledProgram":
        computations: dict[str, list[str]] = {}
        entry = name = ""
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                name = found.group(2)
                computations[name] = []
                entry = name if found.group(1) else entry
            elif line.rstrip() == "}":
                name = ""
            elif name:
                computations[name].append(line)
        if not entry:
            raise ValueError(
                "Optimized HLO text must have an ENTRY computation, but got "
                f"{text[:80]!r}; pass `compiled.as_text()`."
            )
        header = re.search(r"^HloModule .*$", text, re.MULTILINE)
        sizes = [
            int(found.group(1)) if found else 1
            for name in ("replica_count", "num_partitions")
            for found in [re.search(rf"\b{name}=(\d+)", header[0] if header else "")]
        ]
        lines = {name: tuple(body) for name, body in computations.items()}
        return cls(lines, entry, *sizes)

    @cached_property
    def instructions(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions of each computation that communicate or call."""
        return {
            name: tuple(
                instruction
                for line in lines
                if _RELEVANT.search(line) and (instruction := Instruction.parse(line))
            )
            for name, lines in self.computations.items()
        }

    def body(self, name: str) -> tuple[Instruction, ...]:
        """All instructions of a computation, in the order in which they run."""
        if name not in self._bodies:
            parsed = map(Instruction.parse, self.computations.get(name, ()))
            self._bodies[name] = tuple(each for each in parsed if each)
        return self._bodies[name]

    @cached_property
    def _trips(self) -> TripReader:
        return TripReader(self.computations)

    def read(self) -> Iterator[Collective]:
        yield from self.walk(self.entry, Surroundings())

    @cached_property
    def is_tpu(self) -> bool:
        """Whether it is for TPUs, whose layouts have tiles."""
        entry = self.computations[self.entry]
        return any(":T(" in line for line in entry)

    def walk(self, name: str, around: Surroundings) -> Iterator[Collective]:
        for instruction in self.instructions.get(name, ()):
            if instruction.is_continued:
                continue
            if instruction.collective_kind:
                yield from self.collectives_of(name, instruction, around)
            elif instruction.opcode == "while":
                yield from self._walk_loop(name, instruction, around)
            elif not instruction.opcode.endswith(("-done", "-update")):
                is_branch = instruction.opcode == "conditional"
                inside = around.in_branch() if is_branch else around
                for called in instruction.called:
                    yield from self.walk(called, inside)

    def _walk_loop(
        self, name: str, loop: Instruction, around: Surroundings
    ) -> Iterator[Collective]:
        trips = self.trips(name, loop)
        condition, body = loop.called_as("condition"), loop.called_as("body")
        # The condition is tested once more than the body runs.
        tests = around.in_loop(None if trips is None else trips + 1)
        yield from self.walk(condition, tests)
        if trips != 0:
            yield from self.walk(body, around.in_loop(trips))

    def trips(self, name: str, loop: Instruction) -> int | None:
        operand = re.match(r"%?([\w.\-]+)\)", loop.rest)
        if loop.trip_count is not None or operand is None:
            return loop.trip_count
        condition, body = loop.called_as("condition"), loop.called_as("body")
        return self._trips.trip_count(name, operand.group(1), condition, body)

    def collectives_of(
        self, name: str, instruction: Instruction, around: Surroundings
    ) -> Iterator[Collective]:
        kind = instruction.collective_kind
        assert kind, f"{instruction.opcode} is no collective."
        is_permute = kind == "collective_permute"
        attribute = "source_target_pairs" if is_permute else "replica_groups"
        groups = device_groups(
            parse_groups(instruction.attribute(attribute)),
            kind=kind,
            has_channel=bool(instruction.attribute("channel_id")),
            has_global_ids="use_global_device_ids=true" in instruction.rest,
            num_replicas=self.num_replicas,
            num_partitions=self.num_partitions,
        )
        reduction = self._reduction(instruction.called_as("to_apply"))
        arrays = list(instruction.result_arrays())
        if kind == "all_to_all" and not instruction.attribute("dimensions"):
            # This form makes a tuple with one piece from each device of the group.
            arrays = [(arrays[0][0], sum(num_bytes for _, num_bytes in arrays))]
        for dtype, num_bytes in arrays:
            yield Collective(
                kind,
                groups,
                dtype,
                num_bytes,
                around.count,
                reduction,
                instruction.source,
                around.conditional,
                around.unbounded,
                instruction.is_async,
                len(arrays),
                may_round=self.is_tpu,
                is_again=".remat" in instruction.name,
            )

    def _reduction(self, computation: str) -> str:
        opcodes = (
            opcode
            for line in self.computations.get(computation, ())
            for opcode in re.findall(r" ([a-z]+)\(", line)
        )
        return next((_REDUCTIONS[o] for o in opcodes if o in _REDUCTIONS), "")


_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, ?device_ids=\((.*?\)?)\))?(?: ?\{([^}]*)\})?")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")

Groups = list[list[int]]


def parse_groups(text: str) -> Groups:
    """Returns the groups that `text` starts with; none of them means all devices.

    {{0,1},{2,3}}                 listed; also (source, target) pairs
    {} or nothing                 all devices
    [4,2]<=[2,4]T(1,0)            iota: reshape, transpose, cut into rows
    mesh['a'=2,'b'=4] {'b'}       along the named axes of a mesh of iota devices
    mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}     the same, devices reordered
    mesh['a'=8] {'a':(2)4}        along part of an axis: of size 4, after 2

    Raises:
      ValueError: if the spelling is not one of those above.
    """
    if not text or text.startswith("{}"):
        return []
    if text.startswith("{{"):
        rows = text[: text.index("}}") + 1]
        return [_numbers(row) for row in re.findall(r"\{([\d,]+)", rows)]
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if found := _IOTA.match(text):
        num_groups, size = _numbers(found.group(1))
        ids = _iota(found.group(2) or found.group(1), found.group(3))
        return ids.reshape(num_groups, size).tolist()
    raise ValueError(
        "Device groups must be spelled {{...}}, [...]<=[...] or mesh[...], but got "
        f"{text[:60]!r}; add the new spelling to autopar/audit/compiled_collectives.py."
    )


def _mesh_groups(text: str) -> Groups:
    found = _MESH.match(text)
    assert found, f"Cannot read the mesh in {text[:60]!r}."
    names = re.findall(r"'([^']+)'=(\d+)", found.group(1))
    sizes = {name: int(size) for name, size in names}
    devices = _mesh_devices(found.group(2), tuple(sizes.values()))
    # Every axis becomes one dim, or three where only part of it takes part.
    dims: list[int] = []
    dim_by_axis: dict[str, int] = {}
    chosen = _AXIS.findall(found.group(3) or "")
    cuts = {name: (int(before), int(size)) for name, before, size in chosen if before}
    for name, size in sizes.items():
        before, part = cuts.get(name, (1, size))
        dim_by_axis[name] = len(dims) + 1
        dims += [before, part, size // (before * part)]
    inner = [dim_by_axis[name] for name, _, _ in chosen]
    outer = [dim for dim in range(len(dims)) if dim not in inner]
    group_size = prod(dims[dim] for dim in inner)
    ordered = devices.reshape(dims).transpose(outer + inner)
    return ordered.reshape(-1, group_size).tolist()


def _mesh_devices(text: str | None, sizes: Sequence[int]) -> np.ndarray:
    if not text:
        return np.arange(prod(sizes))
    if found := _IOTA.match(text):
        return _iota(found.group(2) or found.group(1), found.group(3)).reshape(-1)
    return np.array(_numbers(text))


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    shape = _numbers(dims)
    ids = np.arange(prod(shape)).reshape(shape)
    return ids.transpose(_numbers(permutation)) if permutation else ids


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
