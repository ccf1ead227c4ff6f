"""Seconds of units on a machine, by the product's costs of products and collectives.

A unit's phases are its forward pass, what is recomputed, its backward pass, and what
happens once a step. Apart from them is what
may run beside compute: gathered parameters and reduced gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.costs.collectives import collective_seconds
from autopar.costs.compute import ATTENTION_RATES
from benchmarks.published.machines import link_of
from benchmarks.published.work import DATA, Execution, Layout, Move, Product, Unit

FORWARD, RECOMPUTE, BACKWARD, ONCE = range(4)
_BACKWARD_FLOPS = 2.5  # five products, one of them made again, for two of forward
_CAST_BYTES = 6  # of 16 bits to float8: its largest value read, read, written both ways


@dataclass(frozen=True)
class System:
    """How a system runs what it is given.

    Attributes:
      remat: what is recomputed of each layer: `none`; `streams`, what is no product;
        `half`, these and every second product; `full`.
      recomputes_all: the last product of a layer, too, whose result nothing reads: what
        is no compiler does not know.
      attention: what a fused one reaches of the rate of large products, forward and
        backward; by default cuDNN's on an H100, estimated from 600 Tflop/s forward
        without a mask (Shah et al., FlashAttention-3, 2024: heads of 128, 8,192
        tokens), less for half-masked blocks, and backward less still.
      gathers: parameters are split over `inner`, gathered for each pass of a microbatch
        and their gradients scattered (FSDP, ZeRO-3).
      splits_state: the optimizer's state is split over `data` too (ZeRO-1).
      reduces_always: gradients are reduced after every microbatch, not once a step, and
        each device keeps its share of them (ZeRO-2).
      decomposes: passes, of `forward` and `backward`, whose products are cut in parts,
        so that tensor groups send beside them (collective matmul, async TP).
      copies_moves: what tensor groups gather and scatter is laid out anew by a copy,
        as it is along no leading dim, unless products are decomposed.
      gradient_bytes: of a parameter's, as they are sent; parameters have two.
      host_seconds: of the host for each kernel, where it starts them one by one.
      has_equal_stages: stages have equally many layers, not equal seconds.
      balances_flops: stages have equal forward flops a device, not equal seconds: Alpa
        clusters operators into layers so (OSDI 2022, section 5.2).
      kept_bytes: of optimizer state for a parameter beside the model's own.
      update_bytes: of what its update makes for a parameter, once activations are gone.
      gate_bytes: of the masks that its gate holds at once, for a token and a slot.
      has_largest_microbatch: it runs the largest microbatches that fit.
    """

    how: Execution = field(default_factory=Execution)
    remat: str = "full"
    recomputes_all: bool = False
    attention: tuple[float, float] = ATTENTION_RATES
    gathers: bool = False
    splits_state: bool = True
    reduces_always: bool = False
    decomposes: tuple[str, ...] = ()
    copies_moves: bool = False
    gradient_bytes: int = 2
    host_seconds: float = 0.0
    has_equal_stages: bool = False
    balances_flops: bool = False
    kept_bytes: int = 0
    update_bytes: int = 0
    gate_bytes: int = 0
    has_largest_microbatch: bool = False


@cache
def product_seconds(product: Product, dtype: str, cluster: Cluster) -> float:
    """Of all that a product counts."""
    size = {"float8": 1, "float32": 4}.get(dtype, 2)
    sizes: tuple[Any, ...] = product.count, product.m, product.n, product.k
    (_, m, n, k), device = sizes, cluster.device
    moved = product.count * (size * (m * k + k * n) + max(size, 2) * m * n)
    seconds = device.product_seconds(dtype, *sizes)
    return cluster.kernel_seconds + max(seconds, moved / device.bytes_per_second)


@lru_cache(maxsize=65536)
def move_seconds(move: Move, layout: Layout, cluster: Cluster) -> float:
    """Of one collective; a permute around a group goes in so many steps."""
    link = link_of(cluster, layout.mesh, move.axes)
    if link.size == 1:
        return 0.0
    return float(collective_seconds(move.kind, move.bytes, link))


def gradients_of(product: Product) -> tuple[Product, Product]:
    """Of the left operand, and of the right one."""
    m, n, k = product.m, product.n, product.k
    return replace(product, n=k, k=n), replace(product, m=k, k=m)


def unit_seconds(
    unit: Unit, layout: Layout, cluster: Cluster, system: System, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """[phases] what is waited for and what is ahead, of one microbatch, whose gradients
    are added to those before; once: of a step."""
    waited, ahead = np.zeros(ONCE + 1), np.zeros(ONCE + 1)
    dtype = dtype if unit.is_repeated or dtype != "float8" else "bfloat16"
    starts, remat = cluster.kernel_seconds, system.remat if unit.is_repeated else "none"
    spares = unit.ends_layer and not system.recomputes_all
    for place, product in enumerate(unit.products):
        forward = product_seconds(product, dtype, cluster)
        left, right = (
            product_seconds(each, dtype, cluster) for each in gradients_of(product)
        )
        if dtype == "float8":
            cast = cluster.device.bytes_per_second / (_CAST_BYTES * product.count)
            forward += product.m * product.k / cast
            left += product.m * product.n / cast
        waited[FORWARD] += forward
        is_last = spares and product is unit.products[-1]
        if (remat == "full" and not is_last) or (remat == "half" and place % 2):
            waited[RECOMPUTE] += forward
        waited[BACKWARD] += left + right
    for stream in unit.streams:
        each = stream.bytes / cluster.device.bytes_per_second
        waited[FORWARD] += starts + stream.forward * each
        waited[BACKWARD] += starts + stream.backward * each
        waited[RECOMPUTE] += (starts + stream.forward * each) * (remat != "none")
    sums = unit.params + unit.experts
    if system.gathers or system.reduces_always:
        sums /= layout.inner or layout.data
    moved = 3 * system.gradient_bytes * sums
    waited[BACKWARD] += moved / cluster.device.bytes_per_second
    if unit.attention is not None:
        rate = cluster.device.flops_per_second("bfloat16")
        quick, slow = system.attention
        forward = unit.attention.flops / (quick * rate)
        backward = _BACKWARD_FLOPS * unit.attention.flops / (slow * rate)
        waited[FORWARD] += starts + forward
        waited[RECOMPUTE] += forward * (remat == "full")
        waited[BACKWARD] += starts + backward
    if (
        system.host_seconds and unit.experts
    ):  # which tokens go where, the host waits for
        waited[FORWARD] += system.host_seconds * _num_kernels(unit)
        waited[BACKWARD] += 2 * system.host_seconds * _num_kernels(unit)
    for move in unit.moves:
        is_last = spares and move.kind in ("all_reduce", "reduce_scatter")
        again = "none" if is_last and remat == "full" else remat
        _add_move(move, layout, cluster, system, again, (waited, ahead))
    for move, phase in _moves_of_parameters(unit, layout, system):
        ahead[phase] += move_seconds(move, layout, cluster)
    return waited, ahead


def _add_move(
    move: Move,
    layout: Layout,
    cluster: Cluster,
    system: System,
    remat: str,
    into: tuple[np.ndarray, np.ndarray],
) -> None:
    """Adds a move of activations to what is waited for, or to what is ahead.

    What is recomputed gathers again, and reduces again unless products are kept.
    """
    seconds = move_seconds(move, layout, cluster)
    copied, is_tensor = 0.0, move.axes == ("tensor",)
    if is_tensor and system.copies_moves:
        parts = layout.tensor if move.kind == "reduce_scatter" else 1
        copied = 2 * parts * move.bytes / cluster.device.bytes_per_second
    is_again = remat == "full" or (remat == "half" and move.kind == "all_gather")
    times = {
        FORWARD: ("forward", move.forward),
        RECOMPUTE: ("forward", move.forward * is_again),
        BACKWARD: ("backward", move.backward),
    }
    for phase, (name, number) in times.items():
        is_ahead = move.is_ahead or (is_tensor and name in system.decomposes)
        copies = 0.0 if is_ahead else copied
        into[is_ahead][phase] += number * (seconds + copies)


def _num_kernels(unit: Unit) -> float:
    """Of a forward pass: products one by one, three operators for each stream."""
    return sum(p.count for p in unit.products if p.is_weight) + 3 * len(unit.streams)


def _moves_of_parameters(
    unit: Unit, layout: Layout, system: System
) -> list[tuple[Move, int]]:
    """Gathers and reductions, of which the last axis of a tuple is innermost."""
    dense, own = unit.params, unit.experts
    gathered, gradient = 2, system.gradient_bytes
    parts = layout.inner or layout.data
    found: list[tuple[Move, int]] = []
    inner, outer = (DATA[1], "context"), (DATA[0],)
    all_data = (*DATA, "context")
    if system.gathers:
        parts *= layout.context
        gather = Move("all_gather", inner, dense * gathered)
        scatter = Move("reduce_scatter", inner, dense * gradient / parts)
        found += [(gather, FORWARD), (gather, BACKWARD), (scatter, BACKWARD)]
        rest = Move("all_reduce", outer, dense * gradient / parts)
        return [*found, (rest, ONCE)]
    size = layout.data * layout.context
    scattered = Move("reduce_scatter", all_data, dense * gradient / size)
    if system.reduces_always:
        found.append((scattered, BACKWARD))
    elif system.splits_state:
        found.append((scattered, ONCE))
    else:
        found.append((Move("all_reduce", all_data, dense * gradient), ONCE))
    if system.reduces_always or system.splits_state:
        found.append((Move("all_gather", all_data, dense * gathered), ONCE))
    if own:
        phase = BACKWARD if system.reduces_always else ONCE
        found.append((Move("all_reduce", outer, own * gradient), phase))
    return found


def exposed(ahead: float, beside: float, cluster: Cluster) -> float:
    """Of seconds that may run beside others, those that are waited for."""
    return max(cluster.visible_fraction * ahead, ahead - beside)
