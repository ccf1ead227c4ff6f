"""The lines of a program's HLO text: what each makes, by which opcode, from what."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.sharding.collective import KINDS, array_bytes

_COLLECTIVES = {kind.replace("_", "-"): kind for kind in KINDS}
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([a-z][\w\-]*)\(")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)\s*(?:,|$)")  # an operand's, behind its type
_METADATA = re.compile(r", metadata=\{((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**63 - 1
_CALLED = re.compile(
    r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One line: what it makes, by which opcode, with which attributes."""

    name: str
    result: str
    opcode: str
    rest: str
    source: str
    is_root: bool = False

    @classmethod
    def parse(cls, line: str) -> "Instruction | None":
        found = _LINE.match(line)
        if not found:
            return None
        body = re.sub(r"/\*.*?\*/", "", found.group(3))
        result = _leading_type(body)
        opcode = _OPCODE.match(body, len(result) + 1)
        if not opcode:
            return None
        rest = body[opcode.end() :]
        metadata = _METADATA.search(rest)
        name = re.search(r'op_name="([^"]*)"', metadata.group(1)) if metadata else None
        return cls(
            found.group(2),
            result,
            opcode.group(1),
            _METADATA.sub("", rest, count=1),
            name.group(1) if name else "",
            bool(found.group(1)),
        )

    @property
    def inside(self) -> str:
        """The text between its parentheses."""
        return self.rest[: _closing("(" + self.rest) - 1]

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of what it takes."""
        return tuple(_NAME.findall(self.inside))

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
