"""Flops of an iteration, where a table does not say by which Tflop/s were counted.

Authors count the products of a step:

    GPT         96 B S L H^2 (1 + S / 6H) + 6 B S H V   (Narayanan et al. 2021, equation
                3, of MLPs that are 4 H wide): recomputation of layers is work too
    MoE         so, too (alpa-projects/alpa, benchmark/alpa/util.py: compute_moe_tflops)
    Wide-ResNet three times the products of the traced forward pass: what is recomputed
                is not counted (0.2% off the rows of the Alpa paper)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.costs.compute import is_heavy
from autopar.graph.build_graph import STRUCTURED
from autopar.planner.strategies import total_flops
from benchmarks.published.columns import whole
from benchmarks.published.setting import Setting
from benchmarks.published.unit_costs import TRACED_MICROBATCHES, traced_graph
from benchmarks.published.unit_model import UnitModel

_PASSES = 4  # forward, again, and backward, which is two
_PASSES_COUNTED_ONCE = 3  # forward and backward


def counted_flops(
    model: UnitModel, record: Mapping[str, str], setting: Setting
) -> float:
    """Flops of an iteration over `setting.batch_size` examples.

    Args:
      model: the row's.
      record: the row's entries by column.
      setting: the row's sizes.
    """
    if "width_factor" in record:
        return _traced_flops(model) * setting.batch_size
    layers, hidden = whole(record, "layers"), whole(record, "hidden")
    tokens = setting.batch_size * setting.seq_len
    products = 4 * hidden + 2 * setting.seq_len  # of a token: attention, over 2 H
    dense = 2 * hidden * (products + 2 * setting.mlp_ratio * hidden)
    head = 6 * tokens * hidden * setting.vocab_size
    if "experts" not in record:
        return _PASSES * tokens * layers * dense + head
    slots = 2 * setting.group_size
    routed = 2 * hidden * (products + 4 * setting.mlp_ratio * hidden)
    routed += 2 * hidden * whole(record, "experts") + 2 * slots + 4 * hidden * slots
    return _PASSES * tokens * layers / 2 * (dense + routed) + head


def _traced_flops(model: UnitModel) -> float:
    """Of an example, forward and backward."""
    size = model.examples_at_once
    graph = traced_graph(model, size)
    heavy = np.array(
        [
            total_flops(op) * graph.blocks[op.block].weight
            for op in graph.operators()
            if op.kind not in STRUCTURED
            and is_heavy(op.kind)
            and "transpose(" not in graph.tensors[op.results[0]].name
            and "rematted" not in graph.tensors[op.results[0]].name
        ]
    )
    return _PASSES_COUNTED_ONCE * float(heavy.sum()) / TRACED_MICROBATCHES / size
