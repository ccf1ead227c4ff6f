"""The systems that a table compares: which plans each may run on a row's GPUs.

A plan that was published is taken as it is; otherwise the fastest that fits is what the
system is predicted to reach, as its authors report the best they found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.published.constants import Constants
from benchmarks.published.pipeline_time import Outcome, Simulator, best_plan
from benchmarks.published.published_plan import submesh
from benchmarks.published.schedules import INTERLEAVED, ZERO_BUBBLE
from benchmarks.published.simulated_plan import Plan, System
from benchmarks.published.table import Row
from benchmarks.published.unit_costs import Layout

ALPA = System(balances_flops=True)
# The best of many clusterings that its ablations try: as if stages were cut by seconds.
FREE = System()
MEGATRON = System(splits_state=False, has_equal_stages=True)
# Its gate makes one mask of all tokens of a device (microsoft/DeepSpeed,
# deepspeed/moe/sharded_moe.py, top2gating), where GShard cuts them in groups, and
# holds three of 32 bits and one of booleans as it ends ("everything is in fp32 in this
# function": combine1_sec, combine2_sec, combine_weights, dispatch_mask). The authors
# ran its largest microbatch: "deepspeed max bs = 8" (alpa-projects/alpa,
# benchmark/alpa/paper_manual_moe_suite.py). Its Adafactor had one moment, which is not
# factored (benchmark/deepspeed/patch/training.py: beta1), and ZeRO-2 copies its share
# of the gradients to 32 bits to update (microsoft/DeepSpeed, zero/stage_1_and_2.py).
DEEPSPEED = System(
    reduces_always=True,
    has_one_group=True,
    gate_bytes=3 * 4 + 1,
    has_largest_microbatch=True,
    kept_bytes=4,
    update_bytes=4,
)
MOST_TENSOR = 8  # of Megatron, whose groups stay inside a host
MOST_CHUNKS = 8  # of layers that a device of an interleaved pipeline has
_FEW = 4  # plans that are simulated by their schedules


def predict(
    column: str, row: Row, simulator: Simulator, constants: Constants
) -> Outcome | None:
    """What a column's system is predicted to do; None if nothing fits.

    A published plan is judged as any other: None if it does not fit.
    """
    return best_plan(simulator, candidates(column, row), constants)


def candidates(column: str, row: Row) -> Sequence[Plan]:
    """The plans of a column's system.

    Raises:
      ValueError: an unknown column.
    """
    system = system_of(column)
    if column in row.plans:
        given = row.plans[column]
        shapes = [given.layouts]
        if row.model.splits_freely:
            shapes = list(_reshaped(given.layouts))
        if given.num_microbatches is None:
            plans = list(_with_microbatches(shapes, row, system))
        else:
            plans = [Plan(each, given.num_microbatches, system) for each in shapes]
        return [each for plan in plans for each in _with_chunks(plan, row)]
    if column == "inter_only":
        layouts = (Layout(1, 1, 1, 1),) * row.num_gpus
        return list(_with_microbatches([layouts], row, system))
    if column == "intra_only":
        layouts = [(layout,) for layout in layouts_of(row.num_gpus, row)]
        return list(_with_microbatches(layouts, row, system))
    if column == "deepspeed":
        layouts = [(layout,) for layout in expert_layouts(row)]
        return list(_with_microbatches(layouts, row, system))
    grid = _grid(row, system, has_tensor=column != "pp_dp")
    return list(_with_microbatches(grid, row, system))


def _with_chunks(plan: Plan, row: Row) -> list[Plan]:
    """The plan, or its interleaved forms where a table says that its pipelines are."""
    number, layers = len(plan.layouts), row.model.num_layers
    if not row.setting.is_interleaved or number == 1 or plan.num_microbatches % number:
        return [plan]
    counts = [n for n in range(2, MOST_CHUNKS + 1) if layers % (number * n) == 0]
    forms = [replace(plan, schedule=INTERLEAVED, num_chunks=n) for n in counts]
    return forms or [plan]


def _reshaped(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, ...]]:
    """The same submeshes, of which the first split the batch, the others layers too.

    Activations shrink and weights grow from the first layer of a convolutional network
    to its last.
    """
    seen = set()
    for tensor in (1, 2, 4, 8):
        for first in range(len(layouts)):
            parts = [1] * first + [tensor] * (len(layouts) - first)
            found = tuple(
                replace(each, data=each.size // number, tensor=number)
                for each, part in zip(layouts, parts, strict=True)
                for number in (min(part, each.size),)
            )
            if found not in seen:
                seen.add(found)
                yield found


def system_of(column: str) -> System:
    """How the system of a column works.

    Raises:
      ValueError: an unknown column.
    """
    known = {
        "alpa": ALPA,
        "inter_only": FREE,
        "intra_only": FREE,
        "megatron": MEGATRON,
        "deepspeed": DEEPSPEED,
        "pp_dp": FREE,
    }
    if column not in known:
        raise ValueError(
            f"a column of Tflop/s is one of {', '.join(known)} with `_tflops` behind, "
            f"but got {column!r}."
        )
    return known[column]


def layouts_of(number: int, row: Row) -> list[Layout]:
    """All (data, tensor) shapes of so many GPUs that could hold the row's model."""
    hosts, devices = submesh(number, row.setting.devices_per_host)
    tensors = [n for n in range(1, number + 1) if number % n == 0 and n & (n - 1) == 0]
    if row.model.has_experts:
        tensors = [n for n in tensors if n <= devices]
    found = [Layout(hosts, devices, number // n, n) for n in tensors]
    share = number / row.num_gpus
    return [each for each in found if _may_fit(row, each, share, FREE)]


def expert_layouts(row: Row) -> list[Layout]:
    """The batch over all GPUs, experts over all or over so many neighbours as divide.

    Alpa's authors tried every such number (alpa-projects/alpa,
    benchmark/alpa/paper_manual_moe_suite.py, the last column) and reported the best.
    """
    number = row.num_gpus
    hosts, devices = submesh(number, row.setting.devices_per_host)
    whole = Layout(hosts, devices, number, 1)
    most = row.model.num_experts
    parts = [n for n in range(2, number) if number % n == 0 and most % n == 0]
    found = [*(replace(whole, experts=n) for n in parts), whole]
    return [each for each in found if _may_fit(row, each, 1.0, DEEPSPEED)]


def _grid(
    row: Row, system: System, *, has_tensor: bool = True
) -> Iterator[tuple[Layout, ...]]:
    """Equal stages of (data, tensor) groups, as Megatron-LM is configured."""
    sizes = [n for n in range(1, row.num_gpus + 1) if row.num_gpus % n == 0]
    for data, tensor in product(sizes, sizes if has_tensor else [1]):
        number = data * tensor
        if row.num_gpus % number or tensor > MOST_TENSOR:
            continue
        hosts, devices = submesh(number, row.setting.devices_per_host)
        layout = Layout(hosts, devices, data, tensor)
        if _may_fit(row, layout, number / row.num_gpus, system):
            yield (layout,) * (row.num_gpus // number)


def _may_fit(row: Row, layout: Layout, share: float, system: System) -> bool:
    """Whether an even share of the state alone leaves room: quick, before planning."""
    experts = sum(
        size * count
        for size, count, unit in zip(
            row.model.num_params, row.model.counts, row.model.units, strict=True
        )
        if unit.experts
    )
    total = sum(
        size * count
        for size, count in zip(row.model.num_params, row.model.counts, strict=True)
    )
    dense = (total - experts) * share
    parts = layout.size if system.splits_state else layout.tensor
    itemsize, state = row.model.itemsize, row.model.state_bytes + system.kept_bytes
    held = dense * (2 * itemsize / layout.tensor + state / parts)
    held += experts * share * (itemsize + state) / layout.size
    held += experts * share * itemsize / (layout.experts or layout.size)
    return held < row.setting.memory_bytes


def _with_microbatches(
    layouts: Iterator[tuple[Layout, ...]] | Sequence[tuple[Layout, ...]],
    row: Row,
    system: System,
) -> Iterator[Plan]:
    """Each with every number of microbatches, the fewest first."""
    batch_size = row.batch_size
    counts = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    for each in layouts:
        for count in counts:
            yield Plan(each, count, system)


def our_plans(row: Row) -> list[Plan]:
    """Equal stages of every shape inside a host, with and without recomputation."""
    found: list[Plan] = []
    size = 1
    while size <= row.num_gpus:
        for layout in layouts_of(size, row):
            if size <= row.setting.devices_per_host or size == row.num_gpus:
                stages = (layout,) * (row.num_gpus // size)
                found += _with_microbatches([stages], row, FREE)
        size *= 2
    return found + [replace(plan, remat=False) for plan in found]


def our_best(row: Row, simulator: Simulator, constants: Constants) -> Outcome | None:
    """The fastest of `our_plans` in any schedule; None if nothing fits.

    Other schedules are tried on the plans that could gain most by them: those whose
    busiest submesh works least.
    """
    found = [simulator.run(plan, constants) for plan in our_plans(row)]
    fitting = [each for each in found if each is not None and each.is_feasible]
    fastest = sorted(fitting, key=lambda each: each.seconds)[:_FEW]
    promising = sorted(fitting, key=lambda each: each.least_seconds)[:_FEW]
    plans = (other for each in promising for other in with_schedules(each.plan))
    others = [simulator.run(plan, constants) for plan in plans]
    fastest += [each for each in others if each is not None and each.is_feasible]
    return min(fastest, key=lambda each: each.simulated_seconds, default=None)


def with_schedules(plan: Plan) -> Iterator[Plan]:
    """A pipeline of equal submeshes in every schedule but 1F1B."""
    number = len(plan.layouts)
    if number == 1:
        return
    for name in ZERO_BUBBLE:
        yield replace(plan, schedule=name)
    if plan.num_microbatches % number == 0:
        for chunks in (2, 4):
            yield replace(plan, schedule=INTERLEAVED, num_chunks=chunks)
