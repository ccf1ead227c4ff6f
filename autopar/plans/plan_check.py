"""Checks that a plan, which may be read from an edited file, fits an operator graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod

from ..errors import PlanFileError
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Operand, Operator, OpGraph
from ..rules.base import Factor, factors_of
from ..sharding.ports import ports_of
from ..sharding.spec import REPLICATED, SUM, Spec, axes_of_dim, dim_of, replicated
from .plan import OperatorPlan, ShardingPlan

_NUM_SHOWN = 3


def check_against(plan: ShardingPlan, graph: OpGraph) -> None:
    """Does nothing if `plan` can run `graph` and computes what `graph` says.

    Raises:
      PlanFileError: names, shapes or dtypes differ, or specs contradict each other;
        names the first differences.
    """
    found = list(islice(_differences(plan, graph), _NUM_SHOWN + 1))
    # Positions mean nothing, and specs have other shapes, once the names differ.
    found = found or list(islice(_contradictions(plan, graph), _NUM_SHOWN + 1))
    if found:
        more = ["..."] * (len(found) > _NUM_SHOWN)
        raise PlanFileError(
            f"the plan of {plan.function!r} must fit the step it runs, but for "
            f"{graph.name!r}\n  "
            + "\n  ".join([*found[:_NUM_SHOWN], *more])
            + "\nPlan again with step.plan(...), keep what still fits with "
            "parallelize(step, like=plan), or call with the arguments it was planned "
            "for."
        )


def _differences(plan: ShardingPlan, graph: OpGraph) -> Iterator[str]:
    """Where the plan is of another function, in words."""
    yield from _compare(
        "input",
        [f"{each.path} {list(each.shape)}" for each in plan.inputs],
        [f"{i.path} {list(graph.tensors[i.tensor].type.shape)}" for i in graph.inputs],
    )
    yield from _compare(
        "tensor",
        [f"{t.name}: {t.dtype}{list(t.shape)}, block {t.block}" for t in plan.tensors],
        [
            f"{t.name}: {t.type.dtype.name}{list(t.type.shape)}, block {t.block}"
            for t in graph.tensors
        ],
    )
    yield from _compare(
        "operator",
        [
            _signature(o, len(o.operand_specs), len(o.result_specs))
            for o in plan.operators
        ],
        [_signature(o, len(o.operands), len(o.results)) for o in graph.operators()],
    )
    blocks = zip(plan.trip_counts, plan.outputs, strict=True)
    yield from _compare(
        "block",
        [f"x{trips}, {len(outputs)} outputs" for trips, outputs in blocks],
        [f"x{b.trip_count}, {len(b.outputs)} outputs" for b in graph.blocks],
    )


def _signature(op: Operator | OperatorPlan, num_operands: int, num_results: int) -> str:
    return f"{op.name}: {op.kind} of {num_operands} to {num_results}"


def _compare(noun: str, planned: Sequence[str], seen: Sequence[str]) -> Iterator[str]:
    if len(planned) != len(seen):
        yield f"it has {len(planned)} {noun}s, and the step {len(seen)}"
    for index, (mine, other) in enumerate(zip(planned, seen, strict=False)):
        if mine != other:
            yield f"{noun} {index} is {mine!r}, and in the step {other!r}"


def _contradictions(plan: ShardingPlan, graph: OpGraph) -> Iterator[str]:
    """Specs that the lowering would stumble over, or that would change values."""
    made = [{t.spec, *(c.target for c in t.conversions)} for t in plan.tensors]
    whole = replicated(plan.mesh.num_axes)

    def unmade(what: str, operand: Operand, spec: Spec) -> Iterator[str]:
        if isinstance(operand, int) and spec not in made[operand]:
            name = plan.tensors[operand].name
            yield f"{what} reads {name!r} in a spec that it is not made or copied in"
        if not isinstance(operand, int) and spec != whole:
            yield f"{what} reads a literal in a spec that is not `-`"

    for each, graph_input in zip(plan.inputs, graph.inputs, strict=True):
        if each.spec != plan.tensors[graph_input.tensor].spec:
            yield f"input {each.path!r} has another spec than its tensor"
        owed = {state for state in each.spec if state < REPLICATED}
        if owed - ({SUM} if graph_input.role == "sum" else set()):
            yield f"input {each.path!r} comes complete, and owes no such reduction"
    for op, chosen in zip(graph.operators(), plan.operators, strict=True):
        what = f"operator {op.name!r}"
        for operand, spec in zip(op.operands, chosen.operand_specs, strict=True):
            yield from unmade(what, operand, spec)
        for result, spec in zip(op.results, chosen.result_specs, strict=True):
            if spec != plan.tensors[result].spec:
                yield f"{what} makes {plan.tensors[result].name!r} in another spec"
        if op.kind in STRUCTURED:
            yield from _port_contradictions(op, chosen, plan, graph)
        else:
            yield from _factor_contradictions(op, chosen, plan.mesh.axis_sizes)
    for block, specs in zip(graph.blocks, plan.outputs, strict=True):
        for operand, spec in zip(block.outputs, specs, strict=True):
            yield from unmade(f"the result of block {block.index}", operand, spec)


def _factor_contradictions(
    op: Operator, chosen: OperatorPlan, sizes: Sequence[int]
) -> Iterator[str]:
    """Factors that the operator does not have, or specs that are not theirs."""
    by_name = {factor.name: factor for factor in factors_of(op)}
    unknown = [name for name in chosen.factors if name not in by_name]
    if unknown or len(chosen.factors) != len(sizes):
        yield (
            f"operator {op.name!r} needs one of the factors {', '.join(by_name)} for "
            f"each mesh axis, and is given {', '.join(chosen.factors) or 'none'}"
        )
        return
    factors = [by_name[name] for name in chosen.factors]
    operands = zip(*(factor.operands for factor in factors), strict=True)
    results = zip(*(factor.results for factor in factors), strict=True)
    dims = tuple(map(_dims, (chosen.operand_specs, chosen.result_specs)))
    if (tuple(operands), tuple(results)) != dims:
        yield f"operator {op.name!r} has specs that do not follow from its factors"
        return
    for name in set(chosen.factors):
        axes = zip(sizes, chosen.factors, strict=True)
        used = prod(size for size, other in axes if other == name)
        if len(_orders(by_name[name], chosen)) > 1:
            yield f"operator {op.name!r} has the axes of {name!r} in several orders"
        if not by_name[name].admits(used):
            yield (
                f"operator {op.name!r} cannot split its factor {name!r} of size "
                f"{by_name[name].size} over {used} devices"
            )


def _dims(specs: Sequence[Spec]) -> tuple[Spec, ...]:
    return tuple(tuple(map(dim_of, spec)) for spec in specs)


def _orders(factor: Factor, chosen: OperatorPlan) -> set[tuple[int, ...]]:
    """The orders of a factor's axes in the dims that it splits."""
    states = (*factor.operands, *factor.results)
    specs = (*chosen.operand_specs, *chosen.result_specs)
    axes = tuple(a for a, name in enumerate(chosen.factors) if name == factor.name)
    orders = {
        tuple(axis for axis in axes_of_dim(spec, state) if axis in axes)
        for state, spec in zip(states, specs, strict=True)
        if state >= 0
    }
    return orders | {axes} if factor.halos else orders


def _port_contradictions(
    op: Operator, chosen: OperatorPlan, plan: ShardingPlan, graph: OpGraph
) -> Iterator[str]:
    """Ports whose reads and writes are not all in one spec, or that must be whole."""
    for port in ports_of(graph, op):
        pin = port.pin(plan.mesh)
        specs = {
            _without_leading(plan.tensors[tensor].spec, extra)
            for tensor, extra in port.writes
        }
        for _, extra, (place, index, position) in port.reads:
            read = chosen.operand_specs if place == "operand" else plan.outputs[index]
            specs.add(_without_leading(read[position], extra))
        if None in specs or len(specs) > 1:
            yield f"{port.name!r} has more than one spec at the border of its block"
        elif port.is_whole and specs - {replicated(plan.mesh.num_axes)}:
            yield f"{port.name!r} must be whole on every device"
        elif pin and not all(pin.allows(spec) for spec in specs if spec is not None):
            yield f"{port.name!r} has another spec than the step itself asks for"


def _without_leading(spec: Spec, extra: int) -> Spec | None:
    """The spec without the first `extra` dims; None if one of those is split."""
    if any(0 <= dim_of(state) < extra for state in spec):
        return None
    return tuple(state - extra if state >= extra else state for state in spec)
