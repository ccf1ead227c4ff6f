"""Prints a plan so that a person can judge it: what is split how, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from io import StringIO
from math import isclose
from pathlib import Path
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..costs.compute import is_heavy
from ..sharding.collective import Collective
from ..sharding.group_names import GroupNames
from ..sharding.spec import (
    MAX,
    MIN,
    REPLICATED,
    SUM,
    Spec,
    State,
    dim_of,
    format_spec,
)
from .leaf_groups import common_path, group_leaves, without_numbers
from .plan import InputPlan, OperatorPlan, ShardingPlan

WIDTH = 100  # columns where there is no terminal to ask
MOST_OF_GROUPS = 72  # letters
_WORDS = {REPLICATED: "whole", SUM: "sum", MAX: "max", MIN: "min"}
_T = TypeVar("_T")
_Key = TypeVar("_Key", bound=Hashable)


def format_plan(plan: ShardingPlan, *, operators: bool = False) -> str:
    """The plan as text of 100 columns.

    Args:
      plan: the plan.
      operators: list every operator, not only the heavy ones.
    """
    return as_text(plan_parts(plan, operators))


def print_plan(plan: ShardingPlan, *, operators: bool = False) -> None:
    """Print the plan, as wide as the terminal is; see `format_plan`."""
    show(plan_parts(plan, operators))


def as_text(parts: Iterable[RenderableType]) -> str:
    """What is printed, as lines of 100 columns."""
    text = StringIO()
    console = Console(file=text, width=WIDTH, color_system=None)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show(parts: Iterable[RenderableType]) -> None:
    """Print, as wide as the terminal is."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for part in parts:
        console.print(part)


def plan_parts(plan: ShardingPlan, operators: bool) -> Iterator[RenderableType]:
    """What is printed of a plan, part by part."""
    yield _header(plan)
    yield _leaf_table(plan)
    yield _operator_table(plan) if operators else _heavy_table(plan)
    yield _collective_table(plan)


def _header(plan: ShardingPlan) -> RenderableType:
    predicted = plan.predicted
    mesh = f"{plan.mesh} ({plan.mesh.size} devices), cluster {plan.cluster}"
    split = (
        f"{format_seconds(predicted.compute_seconds)} compute + "
        f"{format_seconds(predicted.collective_seconds)} collectives"
    )
    if predicted.host_seconds:
        split += f" + {format_seconds(predicted.host_seconds)} host transfers"
    memory = (
        f"{format_bytes(predicted.peak_bytes)} a device at the peak, "
        f"{format_bytes(plan.state_bytes())} of it state"
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_row("mesh", Text(mesh))
    grid.add_row("predicted", f"{format_seconds(predicted.step_seconds)} = {split}")
    grid.add_row("collectives", f"{format_bytes(predicted.collective_bytes)} a device")
    grid.add_row("memory", memory)
    if plan.remat:
        grid.add_row("remat", f"{plan.remat}: what the backward pass makes again")
    if plan.padding:
        grid.add_row("padding", plan.padding_words())
    if predicted.host_bytes:
        host = (
            f"{format_bytes(predicted.host_bytes)} a device of state, moved for the "
            f"update in {format_seconds(predicted.host_seconds)}"
        )
        grid.add_row("host memory", host)
    if predicted.bubble_fraction:
        grid.add_row("bubble", f"{predicted.bubble_fraction:.1%} of the time")
    grid.add_row("gap", predicted.gap_words)
    split = predicted.split_flops_fraction
    rest = ", none twice" if split == 1 else "; devices repeat the rest"
    words = f"{split:.1%} of the heavy flops{rest}"
    has_heavy = any(is_heavy(op.kind) for op in plan.operators)
    grid.add_row("split", words if has_heavy else "the step has no heavy operators")
    return Group(Text(f"plan of {plan.function}, for one step", style="bold"), grid)


def _leaf_table(plan: ShardingPlan) -> RenderableType:
    groups = group_leaves(plan.inputs)
    tree = next((group.tree for group in groups if group.mirrors), "")
    rows = table()
    rows.add_column("leaf", overflow="fold")
    rows.add_column("leaves", justify="right")
    rows.add_column("shape", overflow="fold")
    rows.add_column("split over", overflow="fold")
    rows.add_column("bytes a device", justify="right", no_wrap=True)
    for group in groups:
        first = group.first
        is_short = group.tree and group.tree == tree
        rows.add_row(
            Text(f"..{group.path[len(tree) :]}" if is_short else group.path),
            str(len(group.leaves)),
            Text(_shape(first.shape)),
            Text(_place(first, plan)),
            format_bytes(group.bytes),
        )
    if tree:
        mirrors = dict.fromkeys(mirror for group in groups for mirror in group.mirrors)
        note = f".. is {tree}, counted with what is split alike in {', '.join(mirrors)}"
        return Group(section("state and batch", rows), Text(note, style="dim"))
    return section("state and batch", rows)


def _place(leaf: InputPlan, plan: ShardingPlan) -> str:
    """How a leaf is split, and that the host has it."""
    text = format_spec(leaf.spec, len(leaf.shape), plan.mesh.axis_names)
    return f"{text} on the host" if leaf.memory == "host" else text


def _heavy_table(plan: ShardingPlan) -> RenderableType:
    """Products and convolutions; those of one line that are split alike are one row."""
    heavy = [op for op in plan.operators if is_heavy(op.kind)]
    total = sum(op.seconds for op in plan.operators) or 1.0
    title = (
        f"heavy operators ({len(heavy)} of {len(plan.operators)}): the dim of the "
        "result that each axis splits"
    )
    rows = table()
    rows.add_column("operator", overflow="fold")
    rows.add_column("line", overflow="fold")
    for name in plan.mesh.axis_names:
        rows.add_column(Text(name), overflow="fold")
    rows.add_column("compute", justify="right", no_wrap=True)

    def line(op: OperatorPlan) -> str:
        return format_source(op.source)

    for same in _grouped(heavy, lambda op: (_phase(op), line(op), _splits(op))):
        times = f" x{len(same)}" if len(same) > 1 else ""
        seconds = sum(op.seconds for op in same)
        rows.add_row(
            f"{same[0].kind}{_phase(same[0])}{times}",
            Text(line(same[0])),
            *_splits(same[0]),
            f"{seconds / total:.1%}",
        )
    return section(title, rows)


def _operator_table(plan: ShardingPlan) -> RenderableType:
    """Every operator, one a row."""
    title = "operators: the factor each axis splits, and the specs it makes"
    rows = table()
    rows.add_column("operator", overflow="fold")
    rows.add_column("line", overflow="fold")
    rows.add_column("factors", overflow="fold")
    rows.add_column("makes", overflow="fold")
    rows.add_column("seconds", justify="right", no_wrap=True)
    ranks = {tensor.name: len(tensor.shape) for tensor in plan.tensors}
    names = plan.mesh.axis_names
    for op in plan.operators:
        factors = (f"{n}:{f}" for n, f in zip(names, op.factors, strict=False))
        single = len(op.result_specs) == 1
        specs = [
            format_spec(spec, ranks[op.name if single else f"{op.name}:{i}"], names)
            for i, spec in enumerate(op.result_specs)
        ]
        rows.add_row(
            Text(op.name),
            Text(format_source(op.source)),
            Text(" ".join(factors) or "-"),
            Text(", ".join(specs)),
            format_seconds(op.seconds),
        )
    return section(title, rows)


def _collective_table(plan: ShardingPlan) -> RenderableType:
    if not plan.collectives:
        return Text("\nno collectives: every device works on its own")
    lines = {op.source for op in plan.operators}
    names = GroupNames(plan.mesh.size, plan.mesh)

    def line(each: Collective) -> str:
        return format_source(line_of(each, lines))

    def key(each: Collective) -> tuple[str, str, str]:
        axes = names.name(each.kind, each.groups)
        return (without_numbers(line(each)), each.name, axes)

    rows = table()
    rows.add_column("line", overflow="fold")
    rows.add_column("collective", overflow="fold")
    rows.add_column("over", overflow="fold")
    rows.add_column("count", justify="right")
    rows.add_column("bytes", justify="right", no_wrap=True)
    groups = _grouped(plan.collectives, key)
    groups.sort(key=lambda same: -sum(each.total_bytes for each in same))
    for same in groups:
        _, collective, axes = key(same[0])
        rows.add_row(
            Text(common_path([line(each) for each in same])),
            collective,
            Text(_in_short(axes)),
            f"{sum(each.count for each in same):,}",
            format_bytes(sum(each.total_bytes for each in same)),
        )
    return section("collectives, a device a step", rows)


def _in_short(groups: str) -> str:
    is_long = len(groups) > MOST_OF_GROUPS
    return f"{groups[: MOST_OF_GROUPS - 3]}..." if is_long else groups


def line_of(each: Collective, lines: set[str]) -> str:
    """The source line of a collective, or what it converts where that has none."""
    name = each.source
    for index, letter in enumerate(each.source):
        if letter == " " and each.source[index + 1 :] in lines:
            name = each.source[index + 1 :]
    return name


def _phase(op: OperatorPlan) -> str:
    return " (backward)" if "transpose(" in op.name else ""


def _splits(op: OperatorPlan) -> tuple[str, ...]:
    """For each mesh axis what it does to the operator's first result, in words."""
    result: Spec = op.result_specs[0] if op.result_specs else ()
    return tuple(state_words(state) for state in result)


def split_words(spec: Spec, names: Sequence[str]) -> str:
    """What each mesh axis does to a tensor: `x dim 1, y sum`; `whole` if nothing."""
    words = [
        f"{name} {state_words(state)}"
        for name, state in zip(names, spec, strict=True)
        if state != REPLICATED
    ]
    return ", ".join(words) or "whole"


def state_words(state: State) -> str:
    """What a mesh axis does to a tensor: `dim 1`, `whole`, `sum`."""
    return f"dim {dim_of(state)}" if state >= 0 else _WORDS[state]


def _grouped(items: Iterable[_T], key: Callable[[_T], _Key]) -> list[list[_T]]:
    """Items of equal keys together, in the order of the first."""
    groups: dict[_Key, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def section(title: str, rows: RenderableType) -> RenderableType:
    """Rows below a title."""
    return Group(Text(f"\n{title}", style="bold"), rows)


def table(*columns: str) -> Table:
    """A table without lines; columns that begin with `>` are flush right."""
    made = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        if column.startswith(">"):
            made.add_column(Text(column[1:]), justify="right", no_wrap=True)
        else:
            made.add_column(Text(column), overflow="fold")
    return made


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def format_source(source: str) -> str:
    """A source line as `models/gpt.py:12 (attention)`, if below the current folder.

    That of a package begins with the package's name.
    """
    place, _, function = source.partition(" (")
    path, *numbers = place.rsplit(":", 2)
    if not numbers:
        return source
    try:
        path = str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        pass
    path = path.rpartition("site-packages/")[2]
    name = function.rstrip(")").rpartition(".")[2]
    return f"{path}:{numbers[0]}" + (f" ({name})" if name else "")


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: `1.23 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:  # as three digits are rounded up to it
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def is_rounding(was: float, now: float) -> bool:
    """Whether two figures are one, whose sums were taken in another order."""
    return isclose(was, now, rel_tol=1e-9)


def format_bytes(num_bytes: float) -> str:
    """Three digits or more and a unit: `1.5 MiB`."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
