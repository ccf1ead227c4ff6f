"""Reads the collectives out of a program's HLO text, as lowered or as compiled.

The text is cut into computations, which are walked from the entry through calls,
fusions, loops and branches; every collective found is reported with the product of the
known trip counts around it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import jax

from autopar.audit.compiled_values import ValueReader
from autopar.audit.replica_groups import parse_groups
from autopar.sharding.collective import (
    KINDS,
    Collective,
    Surroundings,
    array_bytes,
    device_groups,
)

_COLLECTIVES = {kind.replace("_", "-"): kind for kind in KINDS}
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
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_METADATA = re.compile(r", metadata=\{((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**63 - 1
_CALLED = re.compile(
    r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


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
class Instruction:
    """One line: what it makes, by which opcode, with which attributes."""

    name: str
    result: str
    opcode: str
    rest: str
    source: str

    @classmethod
    def parse(cls, line: str) -> "Instruction | None":
        found = _LINE.match(line)
        if not found:
            return None
        body = re.sub(r"/\*.*?\*/", "", found.group(2))
        result = _leading_type(body)
        opcode = _OPCODE.match(body, len(result) + 1)
        if not opcode:
            return None
        rest = body[opcode.end() :]
        metadata = _METADATA.search(rest)
        name = re.search(r'op_name="([^"]*)"', metadata.group(1)) if metadata else None
        return cls(
            found.group(1),
            result,
            opcode.group(1),
            _METADATA.sub("", rest, count=1),
            name.group(1) if name else "",
        )

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of what it takes."""
        return tuple(re.findall(r"%([\w.\-]+)", self.rest[: _closing("(" + self.rest)]))

    @property
    def collective_kind(self) -> str | None:
        return _COLLECTIVES.get(self.opcode.removesuffix("-start"))

    @property
    def is_async(self) -> bool:
        """Whether a collective is started, and waited for after other work."""
        is_split = '"async_collective_fusion_config"' in self.rest
        is_started = self.opcode.endswith("-start")
        return is_split or (is_started and '"is_sync":true' not in self.rest)

    @property
    def called(self) -> tuple[str, ...]:
        lists = ",".join(_CALLED_LIST.findall(self.rest))
        return (*_CALLED.findall(self.rest), *re.findall(r"[\w.\-]+", lists))

    @property
    def trip_count(self) -> int | None:
        found = re.search(r'"known_trip_count":\{"n":"?(\d+)', self.rest)
        return int(found.group(1)) if found else None

    @property
    def estimated_cycles(self) -> int:
        """What XLA's compiler for TPUs says of a fusion."""
        found = _CYCLES.search(self.rest)
        cycles = int(found.group(1)) if found else 0
        return 0 if cycles == _NO_ESTIMATE else cycles

    @property
    def is_continued(self) -> bool:
        """Whether it goes on with a collective that another instruction has started.

        XLA's compiler for TPUs writes one that runs beside others once more in each of
        these, and where it ends.
        """
        return bool(
            re.search(r'"async_collective_fusion_config":\{"flag_start":"\d', self.rest)
        )

    def attribute(self, name: str) -> str:
        """The text from the value of an attribute on; empty where it is absent."""
        found = re.search(rf"\b{name}=", self.rest)
        return self.rest[found.end() :] if found else ""

    def called_as(self, name: str) -> str:
        """The one computation that an attribute names."""
        found = re.match(r"%?([\w.\-]+)", self.attribute(name))
        return found.group(1) if found else ""

    def result_arrays(self) -> Iterator[tuple[str, int]]:
        """Dtype and bytes of each array that the collective makes."""
        result = self.result
        if self.opcode.endswith("-start") and self.opcode != "all-reduce-start":
            # (operands, results, ...): what is being sent, what comes back, and state.
            result = _elements(result)[1]
        for element, dims in ARRAY.findall(result):
            sizes = [int(size.removeprefix("<=")) for size in dims.split(",") if size]
            yield array_bytes(element, sizes)


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
    def values(self) -> ValueReader:
        """Follows values to where they are made and read."""
        return ValueReader(self.computations)

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

    def trips(self, name: str, loop: "Instruction") -> int | None:
        operand = re.match(r"%?([\w.\-]+)\)", loop.rest)
        if loop.trip_count is not None or operand is None:
            return loop.trip_count
        condition, body = loop.called_as("condition"), loop.called_as("body")
        return self.values.trip_count(name, operand.group(1), condition, body)

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
        for index, (dtype, num_bytes) in enumerate(arrays):
            meant = kind
            if self.is_tpu and kind == "all_reduce" and reduction in ("sum", "or"):
                meant, num_bytes = self._meant(name, instruction, index, len(groups[0]))
            yield Collective(
                meant,
                groups,
                dtype,
                num_bytes,
                around.count,
                "" if meant == "all_gather" else reduction,
                instruction.source,
                around.conditional,
                around.unbounded,
                instruction.is_async,
                len(arrays),
                meant != kind,
                self.is_tpu,
                ".remat" in instruction.name,
            )

    def _meant(
        self, name: str, instruction: Instruction, index: int, size: int
    ) -> tuple[str, int]:
        """The kind that an all-reduce of groups of `size` stands for, and its bytes.

        A small gather may be the sum of its pieces in zeros, and a small reduce-scatter
        a sum of which each device reads its slice.
        """
        arrays = list(instruction.result_arrays())
        whole = arrays[index][1]
        if self.values.is_of_pieces(name, instruction.name, index):
            return "all_gather", whole
        element = index if instruction.result.startswith("(") else None
        read = self.values.slice_read(name, instruction.name, element)
        for dtype, dims in ARRAY.findall(read or ""):
            part = array_bytes(dtype, [int(dim) for dim in dims.split(",") if dim])[1]
            if part * size == whole:
                return "reduce_scatter", part
        return "all_reduce", whole

    def _reduction(self, computation: str) -> str:
        opcodes = (
            opcode
            for line in self.computations.get(computation, ())
            for opcode in re.findall(r" ([a-z]+)\(", line)
        )
        return next((_REDUCTIONS[o] for o in opcodes if o in _REDUCTIONS), "")


def _leading_type(text: str) -> str:
    """The result type that an instruction starts with; a tuple's is parenthesised."""
    if not text.startswith("("):
        return text.partition(" ")[0]
    return text[: _closing(text) + 1]


def _elements(tuple_type: str) -> list[str]:
    """The elements of a tuple type, each a type."""
    inside, elements, depth, start = tuple_type[1:-1], [], 0, 0
    for index, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append(inside[start:index])
            start = index + 1
    return [*elements, inside[start:]]


def _closing(text: str) -> int:
    """Where the parenthesis that opens `text` closes."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"A parenthesis is not closed in {text[:80]!r}.")
