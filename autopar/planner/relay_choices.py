"""Relays where memory counts: shared copies whose bytes live sets see.

An argument is in memory for the whole step, and a loop's operand for the whole loop. A
copy of one takes memory besides, unless it is in the same spec: then everyone reads the
tensor itself. What a plan makes again in all that reads it is in no memory at all,
unless it is copied. So every spec of a relay is there twice, first as the tensor lies
and then copied; beside what lasts, the first takes no bytes.

What is gathered is gathered by the relay: a program makes one copy for all readers and
holds it from the first to the last, so no reader may gather one from the relay. For the
same reason products, arguments and loops' operands have a relay even for a single
reader. Who alone reads what lasts reads the relay as it is: its copy is the relay's, of
which rows tell, and not one beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.solver.choice_graph import EdgeType

from ..graph.op_graph import OpGraph
from .spec_choices import SpecChoices
from .strategies import shard_fractions


def lasting_tensors(graph: OpGraph) -> frozenset[int]:
    """Tensors whose memory is not their block's: arguments and operands of bodies."""
    return frozenset(tensor for block in graph.blocks for tensor in block.inputs)


def twice(specs: np.ndarray) -> np.ndarray:
    """Specs [2k, axes]: as they lie, and copied."""
    return np.concatenate([specs, specs])


def is_copied(num_choices: int) -> np.ndarray:
    """Which choices of `twice` take memory: bool [2k]."""
    return np.arange(num_choices) >= num_choices // 2


def relay_edge(
    sources: SpecChoices, targets: SpecChoices, costs: np.ndarray | None
) -> EdgeType:
    """The edge from a tensor's writer to its relay.

    `costs` [source specs, target specs] are those of a copy, None for none at all. What
    is read as it lies must be in the spec it lies in.
    """
    shape = len(sources.distinct), len(targets.distinct)
    copied = np.zeros(shape) if costs is None else costs
    as_it_lies = np.array(
        [
            [0.0 if s == t else np.inf for t in targets.distinct]
            for s in sources.distinct
        ]
    )
    matrix = np.concatenate([as_it_lies, copied], axis=1)
    offset = np.where(is_copied(len(targets.classes)), shape[1], 0)
    return sources.classes, targets.classes + offset, matrix


def without_growth(
    sources: SpecChoices, targets: SpecChoices, costs: np.ndarray
) -> np.ndarray:
    """`costs` [source specs, target specs], inf where the target takes more memory."""
    held = shard_fractions(np.array(sources.distinct), sources.axis_sizes)
    wanted = shard_fractions(np.array(targets.distinct), targets.axis_sizes)
    return np.where(wanted[None, :] > held[:, None] * (1 + 1e-9), np.inf, costs)


def as_relayed(
    sources: SpecChoices, targets: SpecChoices, costs: np.ndarray | None
) -> np.ndarray:
    """`costs` [relay's specs, reader's specs], inf where it is not read as it is.

    What the relay cannot be is made from it as by others.
    """
    shape = len(sources.distinct), len(targets.distinct)
    costs = np.zeros(shape) if costs is None else costs
    is_same = np.array([[s == t for t in targets.distinct] for s in sources.distinct])
    others = without_growth(sources, targets, costs)
    return np.where(is_same | ~is_same.any(axis=0), others, np.inf)


def without_needless_copies(
    choices: Sequence[int],
    relays: Mapping[int, tuple[int, SpecChoices]],
    writers: Mapping[int, tuple[int, SpecChoices]],
) -> tuple[int, ...]:
    """The same assignment, read as it lies wherever a copy would be in the same spec.

    Args:
      choices: by vertex.
      relays: vertex and specs of each relay of `twice`, by tensor.
      writers: vertex and specs of what makes each of these tensors.
    """
    found = list(choices)
    for tensor, (relay, specs) in relays.items():
        writer, made = writers[tensor]
        half, chosen = len(specs.classes) // 2, found[relay]
        if chosen >= half and specs.of(chosen) == made.of(found[writer]):
            found[relay] = chosen - half
    return tuple(found)
