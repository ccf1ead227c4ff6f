"""Forms of a step: its examples padded or not, its attention as one operator or not.

Examples that the devices do not divide stay whole: devices repeat the work, or split
another dim, which takes collectives. Padded to a number that they do divide, they are
split. Operator by operator, scores of attention are tensors that every device holds its
part of; as one operator they are there block by block, and keys and values may go round
a ring. So a step is planned in each form that could matter, and the quickest is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from math import ceil, prod

from ..attention.finder import FoundAttention, find_attention
from ..attention.rule import KINDS, RINGS
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..graph.traced_function import root_of
from ..methods.layout_rules import LayoutRules
from ..methods.methods import Auto
from ..options import Options
from ..plans.plan import Padding, ShardingPlan
from ..sharding.mesh import parse_mesh
from ..transforms.padded_trace import padded_arguments, with_padding
from .attention_trace import with_attention
from .pin_choices import ChoicePins
from .step_variants import StepVariants

_log = logging.getLogger("autopar")


def forms_to_try(
    step: StepVariants, options: Options, num_devices: int
) -> Iterator[StepVariants]:
    """The step as it is, then padded, each with its attention in the ways to try.

    Raises:
      ValueError: a ring was asked for, but no attention is understood.
    """
    for padding in dict.fromkeys([(), _padding(step, options, num_devices)]):
        yield from _of_attention(_padded(step, padding), options, num_devices)


def form_of_plan(step: StepVariants, plan: ShardingPlan) -> StepVariants:
    """The form that a plan was made of."""
    padded = _padded(step, plan.padding)
    if not any(op.kind in KINDS for op in plan.operators):
        return padded
    return _as_one_operator(padded, find_attention(padded.traced, padded.graph)[0])


def _padding(step: StepVariants, options: Options, num_devices: int) -> Padding:
    """Sizes of more examples than devices, which these do not divide."""
    if options.rules is not None or isinstance(options.method, LayoutRules):
        return ()  # a name is to split dims as they are
    if options.mesh is not None:
        num_devices = parse_mesh(options.mesh, num_devices).size
    padding: dict[int, int] = {}
    for position, size in _examples(step):
        number = num_devices
        if step.graph.inputs[position].tensor in step.batch:
            number *= options.num_microbatches
        if size > number and size % number:
            padding[size] = ceil(size / number) * number
    return tuple(sorted(padding.items()))


def _padded(step: StepVariants, padding: Padding) -> StepVariants:
    if not padding:
        return step
    sizes = dict(padding)
    padded = {i: sizes[size] for i, size in _examples(step) if size in sizes}
    traced = with_padding(step.traced, step.graph, padded)
    graph = build_graph(traced, step.roles)
    longer = padded_arguments(graph)
    batch = [longer.get(tensor, tensor) for tensor in step.batch]
    return StepVariants(traced, graph, step.roles, batch, padding)


def _examples(step: StepVariants) -> Iterator[tuple[int, int]]:
    """Positions of inputs whose dim 0 may be examples, nodes or edges; their number.

    They are the batch, and what is no state beside it: arrays that are arguments of
    their own and do not come back, and others beside some of the batch.
    """
    graph, inputs = step.graph, step.graph.inputs
    of_batch = {root_of(each.path) for each in inputs if each.tensor in step.batch}
    returned = {graph.type_of(each) for each in graph.outputs}
    for position, each in enumerate(inputs):
        kind, root = graph.tensors[each.tensor].type, root_of(each.path)
        is_own = each.path == root and bool(of_batch) and kind not in returned
        is_state = each.role in ("state", "constant")
        if (root in of_batch or is_own) and not is_state:
            if kind.rank and not kind.is_extended:
                yield position, kind.shape[0]


def _of_attention(
    step: StepVariants, options: Options, num_devices: int
) -> Iterator[StepVariants]:
    """Attention as one operator, operator by operator, or both.

    Both where there are more devices than examples, and more scores than queries, keys
    and values, if nothing else is asked for.
    """
    asked = getattr(options.method, "attention", "operators")
    if isinstance(options.method, Auto):
        asked = "auto"
    types = [step.graph.tensors[tensor].type for tensor in step.batch]
    num_examples = min((kind.shape[0] for kind in types if kind.rank), default=1)
    if asked == "ring" or (asked == "auto" and num_examples < num_devices):
        found, refused = find_attention(step.traced, step.graph)
        whys = [f"at {op.source}: {why}" for op, why in refused]
        if asked == "ring" and not found:
            raise ValueError(
                f"A ring needs attention, a product, a softmax of it and a product, "
                f"but {step.graph.name} has none that is understood"
                f"{''.join(f', {why}' for why in whys[:3])}; write it so, for one with "
                f"jax.nn.dot_product_attention, or leave `attention` out."
            )
        for why in whys:
            _log.info("attention is planned operator by operator %s", why)
        if asked == "ring" or any(_is_long(step.graph, each) for each in found):
            yield _as_one_operator(step, found)
    if asked != "ring":
        yield step


def _as_one_operator(
    step: StepVariants, found: Sequence[FoundAttention]
) -> StepVariants:
    traced = with_attention(step.traced, step.graph, found)
    graph = build_graph(traced, step.roles)
    return StepVariants(traced, graph, step.roles, step.batch, step.padding)


def _is_long(graph: OpGraph, found: FoundAttention) -> bool:
    """Whether there are more scores than queries, keys and values."""
    types = [graph.tensors[t].type for t in (found.q, found.k, found.v)]
    sizes = found.attention.sizes(*(each.shape for each in types))
    scores = prod(sizes[label] for label in found.attention.table)
    return scores >= sum(each.size for each in types)


def ring_limits(graph: OpGraph, options: Options) -> tuple[ChoicePins, ...]:
    """What `attention="ring"` leaves of the choices."""
    if getattr(options.method, "attention", "auto") != "ring":
        return ()
    kept = {
        op.index: lambda names: any(name in RINGS for name in names)
        for op in graph.operators()
        if op.kind in KINDS
    }
    return (ChoicePins("attention='ring'", {}, kept),) if kept else ()
