"""What the backward program of a stage makes again instead of being handed it.

Forward and backward of a stage are different programs, so nothing keeps the compiler
from doing work twice, and no barrier is needed: the operators of the forward pass that
lead from what is kept to the residuals are put before those of the backward pass. A
stage that makes everything again keeps its inputs alone, as a cell of GPipe does
(Huang et al. 2019, section 2.3). Loops over layers that keep something of their body
are transformed before the step is cut, as those of one program are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..frontend.tracing import TracedFunction
from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..rematerialisation.recompute_sets import group_of, recompute_sets
from ..rematerialisation.remat import Remat
from ..rematerialisation.remat_trace import with_recomputation
from .stage_cut import StageCut


def with_recomputed_loops(
    traced: TracedFunction, graph: OpGraph, batch: Sequence[int], remat: Remat
) -> TracedFunction:
    """A step whose backward loops over layers do again what the level does of a body.

    "full" leaves loops as they are: the whole loop is done again by the stage.
    `batch` are the inputs of `graph`, the graph of `traced`, that hold examples.
    """
    if remat.level == "full":
        return traced
    sets = recompute_sets(graph, batch, remat)
    none = frozenset[int]()
    loops = replace(sets, groups={}, backward=none, cotangents=none)
    return with_recomputation(traced, graph, loops)


def with_recomputed_stages(
    cut: StageCut, graph: OpGraph, examples: Sequence[int], remat: Remat, number: int
) -> StageCut:
    """The stages, of which the first `number` make residuals again in their backward.

    `examples` are the inputs of `graph` that hold examples.
    """
    backward = list(cut.backward)
    for stage in range(number):
        forward = cut.forward[stage]
        made = {t for op in forward for t in op.results}
        reads = _reads([*backward[stage], *cut.weight[stage]])
        inputs = set(_reads(forward)) - made
        group = group_of(
            *(graph, examples, remat, forward),
            wanted=[t for t in reads if t in made],
            known={t for t in inputs if t in graph.blocks[0].inputs},
        )
        if group is not None:
            chosen = {op.index for op in (*group, *backward[stage])}
            backward[stage] = tuple(
                op for op in graph.blocks[0].operators if op.index in chosen
            )
    return replace(cut, backward=tuple(backward))


def made_again(cut: StageCut, stage: int) -> frozenset[int]:
    """What backward makes again and the weight task of the stage reads."""
    again = {op.index for op in cut.forward[stage]}
    made = {t for op in cut.backward[stage] if op.index in again for t in op.results}
    own = {t for op in cut.weight[stage] for t in op.results}
    return frozenset((made & set(_reads(cut.weight[stage]))) - own)


def _reads(operators: Iterable[Operator]) -> dict[int, None]:
    return dict.fromkeys(t for op in operators for t in tensors_of(op.operands))
