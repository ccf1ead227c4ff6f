"""Checks that a program holds the collectives its plan predicts, and no others.

Two levels. The lowered program's collectives must *equal* the plan's: for each kind,
reduction and device groups the same bytes and types, equally often. The compiled
program's may be *fewer*: no kind or group that is not planned, no more bytes than
planned (but what it took from two smaller groups), and every difference has the name
of a rewrite (see `rewrites.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO

import jax.numpy as jnp
from rich.console import Console, Group
from rich.table import Table

from autopar.audit.folds import Key, fold
from autopar.audit.rewrites import Comparison, compare, executions, in_words
from autopar.errors import AuditError
from autopar.lowering.memory_use import MemoryUse
from autopar.sharding.collective import Collective, Groups, num_operations
from autopar.sharding.group_names import GroupNames
from autopar.sharding.mesh import MeshShape


@dataclass(frozen=True)
class Difference:
    """One collective that a program does not hold as planned.

    Args:
      level: `lowered` or `compiled`.
      collective: kind, reduction and mesh axes.
      planned: what the plan has, in words.
      seen: what the program has, in words.
      reason: the rewrites that explain it, or what is wrong.
      is_wrong: whether nothing explains it.
    """

    level: str
    collective: str
    planned: str
    seen: str
    reason: str
    is_wrong: bool

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.collective}: planned {self.planned}, but the {self.level} program "
            f"has {self.seen}{reason}"
        )


@dataclass(frozen=True)
class AuditRow:
    """Bytes on one device in one step of all collectives of one kind and group.

    `operations` says how many operations the lowered and the compiled program have for
    them, and how many of these run beside other work; empty if nothing is compiled.
    """

    collective: str
    axes: str
    planned_bytes: int
    lowered_bytes: int
    compiled_bytes: int | None
    explanation: str
    is_wrong: bool
    operations: str = ""


@dataclass(frozen=True)
class Audit:
    """What a plan predicts beside what its program does; prints as a table.

    Args:
      rows: one for each kind, reduction and groups that anyone has.
      differences: where a program is not as planned, explained or wrong.
      memory: the compiled program's memory on one device, if it was asked for.
      predicted_bytes: the plan's own figure for `memory.device_bytes`, if given.
    """

    rows: tuple[AuditRow, ...]
    differences: tuple[Difference, ...]
    memory: MemoryUse | None = None
    predicted_bytes: int | None = None

    @property
    def ok(self) -> bool:
        """Whether every difference is explained."""
        return not any(difference.is_wrong for difference in self.differences)

    def raise_if_wrong(self) -> None:
        """Does nothing if all is as planned or explained.

        Raises:
          AuditError: if not, naming each collective, the planned and the seen value.
        """
        wrong = [str(each) for each in self.differences if each.is_wrong]
        if wrong:
            raise AuditError(
                "A program must hold the collectives of its plan, but "
                f"{len(wrong)} differ:\n  "
                + "\n  ".join(wrong)
                + "\nThis is autopar's mistake, not the step's: please report it with "
                "the plan, as `plan.save` writes it."
            )

    def __rich__(self) -> Group:
        table = Table(title="collectives, bytes a device a step")
        for heading in ("collective", "over"):
            table.add_column(heading, overflow="fold")
        for heading in ("planned", "lowered", "compiled"):
            table.add_column(heading, justify="right")
        table.add_column("operations", justify="right")
        table.add_column("explanation", overflow="fold")
        for row in self.rows:
            compiled = "-" if row.compiled_bytes is None else f"{row.compiled_bytes:,}"
            table.add_row(
                row.collective,
                row.axes,
                f"{row.planned_bytes:,}",
                f"{row.lowered_bytes:,}",
                compiled,
                row.operations,
                row.explanation,
                style="bold red" if row.is_wrong else None,
            )
        return Group(table, *self._lines())

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=110, color_system=None).print(self)
        return text.getvalue().rstrip()

    def _lines(self) -> Iterable[str]:
        if self.memory:
            yield f"memory: {self.memory}"
            if self.predicted_bytes:
                ratio = self.memory.device_bytes / self.predicted_bytes
                yield f"        {ratio:.2f} of the {self.predicted_bytes:,} B predicted"
            if any(row.compiled_bytes is None for row in self.rows):
                yield "over several slices only the lowered collectives are compared"
        wrong = sum(difference.is_wrong for difference in self.differences)
        yield f"audit: {wrong} wrong" if wrong else "audit: ok"


def audit(
    planned: Sequence[Collective],
    lowered: Sequence[Collective],
    compiled: Sequence[Collective] | None,
    *,
    num_devices: int,
    memory: MemoryUse | None = None,
    mesh: MeshShape | None = None,
    predicted_bytes: int | None = None,
) -> Audit:
    """Compares a plan's collectives with those of its lowered and compiled program.

    Collectives that move nothing (groups of one device, no bytes) are ignored.

    Args:
      planned: what the plan predicts.
      lowered: from `collectives_in_lowered`.
      compiled: from `collectives_in_compiled`; None where the hardware is absent.
      num_devices: how many devices the program runs on.
      memory: from `MemoryUse.of(compiled)`.
      mesh: gives the axis names that device groups are printed as.
      predicted_bytes: what the plan predicts for `memory.device_bytes`.

    Raises:
      ValueError: if a collective or the mesh has devices beyond `num_devices`.
    """
    names = GroupNames(num_devices, mesh)
    plan, program = _by_key(planned, num_devices), _by_key(lowered, num_devices)
    binary = None
    if compiled is not None:
        binary = _by_key(_as_meant(compiled, planned), num_devices)
    program = _once_where_unbounded(plan, program)
    binary = None if binary is None else _once_where_unbounded(plan, binary)
    # Equal to the plan, the lowered program also says which operation runs how often,
    # which a plan may sum up.
    keys = sorted(plan.keys() | program.keys() | (binary or {}).keys())
    reference: Mapping[Key, Sequence[Collective]] = {
        key: program.get(key, ())
        if executions(plan.get(key, ())) == executions(program.get(key, ()))
        else plan.get(key, ())
        for key in keys
    }
    reference, folds = fold(reference, binary or {}, names.name)
    rows, differences = [], []
    for key in keys:
        kind, _, groups = key
        axes = names.name(kind, groups)
        wanted, found = plan.get(key, ()), program.get(key, ())
        here = [_compare_lowered(f"{_name(key)} over {axes}", wanted, found)]
        if binary is not None:
            seen = binary.get(key, ())
            comparison = compare(reference[key], seen, folds.get(key, ()))
            here.append(
                _compiled_difference(
                    f"{_name(key)} over {axes}", wanted, seen, comparison
                )
            )
        real = [difference for difference in here if difference]
        rows.append(
            AuditRow(
                _name(key),
                axes,
                _bytes(wanted),
                _bytes(found),
                None if binary is None else _bytes(binary.get(key, ())),
                "; ".join(f"{each.level}: {each.reason}" for each in real),
                any(each.is_wrong for each in real),
                "" if binary is None else _operations(found, binary.get(key, ())),
            )
        )
        differences += real
    return Audit(tuple(rows), tuple(differences), memory, predicted_bytes)


def _compare_lowered(
    name: str, planned: Sequence[Collective], lowered: Sequence[Collective]
) -> Difference | None:
    wanted, found = executions(planned), executions(lowered)
    if wanted == found:
        return None
    gone = [each for each in planned if (each.dtype, each.bytes) in wanted - found]
    new = [each for each in lowered if (each.dtype, each.bytes) in found - wanted]
    reasons = [
        *(f"planned for {source}" for source in _sources(gone)),
        *(f"comes from {source}" for source in _sources(new)),
    ]
    return Difference(
        "lowered",
        name,
        in_words(wanted - found),
        in_words(found - wanted),
        ", ".join(reasons) or "not as planned",
        is_wrong=True,
    )


def _compiled_difference(
    name: str,
    planned: Sequence[Collective],
    compiled: Sequence[Collective],
    comparison: Comparison,
) -> Difference | None:
    if not comparison.rewrites:
        return None
    return Difference(
        "compiled",
        name,
        in_words(executions(planned)),
        in_words(executions(compiled)),
        str(comparison),
        not comparison.is_allowed,
    )


def _by_key(
    collectives: Iterable[Collective], num_devices: int
) -> Mapping[Key, list[Collective]]:
    found: dict[Key, list[Collective]] = {}
    for each in collectives:
        last = max((max(group, default=0) for group in each.groups), default=0)
        if last >= num_devices:
            raise ValueError(
                f"Collectives must stay within the {num_devices} devices audited, but "
                f"got {each}; pass the `num_devices` of the mesh."
            )
        if not each.is_trivial:
            found.setdefault((each.kind, each.reduction, each.groups), []).append(each)
    return found


def _as_meant(
    compiled: Iterable[Collective], planned: Iterable[Collective]
) -> Iterator[Collective]:
    """All-reduces that are not planned, as what they stand for.

    XLA for TPUs writes a small gather as the sum of its pieces in zeros, and a small
    reduce-scatter as a sum of which each device reads its slice.
    """
    wanted = Counter[tuple[str, str, Groups, int]]()
    for each in planned:
        wanted[_form(each)] += each.count
    left = Counter(wanted)
    for each in sorted(compiled, key=_may_stand_for_others):
        meant = [each]
        if _may_stand_for_others(each):
            part = each.bytes // len(each.groups[0])
            meant += [
                replace(each, kind="all_gather", reduction="", by_all_reduce=True),
                replace(each, kind="reduce_scatter", bytes=part, by_all_reduce=True),
            ]
        known = wanted if each.is_again else left
        found = next((m for m in meant if known[_form(m)] >= m.count), each)
        left[_form(found)] -= found.count
        yield found


def _may_stand_for_others(each: Collective) -> bool:
    is_sum = each.kind == "all_reduce" and each.reduction in ("sum", "or")
    return is_sum and each.may_round


def _form(each: Collective) -> tuple[str, str, Groups, int]:
    """What is sent among whom, whatever its type: its number of elements."""
    length = each.bytes // jnp.dtype(each.dtype).itemsize
    return each.kind, each.reduction, each.groups, length


def _once_where_unbounded(
    plan: Mapping[Key, Sequence[Collective]], program: Mapping[Key, list[Collective]]
) -> Mapping[Key, list[Collective]]:
    """Count what the plan has in loops of unknown length as the plan does: once.

    A program may say how often such a loop runs where the plan could not know.
    """
    found = {}
    for key, pieces in program.items():
        planned = executions(plan.get(key, ()))
        unbounded = executions([c for c in plan.get(key, ()) if c.unbounded])
        seen = executions(pieces)
        kept = []
        for each in pieces:
            piece = (each.dtype, each.bytes)
            times, left = divmod(seen[piece], max(planned[piece], 1))
            if unbounded[piece] == planned[piece] > 0 and times > 1 and not left:
                each = replace(each, count=max(each.count // times, 1))
            kept.append(each)
        found[key] = kept
    return found


def _name(key: Key) -> str:
    kind, reduction, _ = key
    return f"{kind}({reduction})" if reduction else kind


def _bytes(collectives: Iterable[Collective]) -> int:
    return sum(each.total_bytes for each in collectives)


def _operations(lowered: Sequence[Collective], compiled: Sequence[Collective]) -> str:
    """`161 -> 1, 1 async`: what the compiler combined, and what runs beside others."""
    number = num_operations(compiled)
    beside = num_operations(each for each in compiled if each.is_async)
    text = str(number) if number == len(lowered) else f"{len(lowered)} -> {number}"
    return f"{text}, {beside} async" if beside else text


def _sources(collectives: Iterable[Collective]) -> list[str]:
    """The first three sources."""
    return list(dict.fromkeys(each.source for each in collectives if each.source))[:3]
