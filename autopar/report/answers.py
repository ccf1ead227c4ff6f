"""What is asked of a plan first: does it fit, is it any good, what should change.

Advice is of plans that were made while this one was looked for, at their prices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import jax
import numpy as np

from ..audit.replay import Replay
from ..clusters.cluster import Cluster
from ..clusters.ici import SLICES
from ..option_values import RESERVED_FRACTION
from ..plans.explain import format_bytes, format_seconds
from ..plans.plan import MemoryShares, Prediction, TriedPlan
from ..plans.plan_view import LeafView, PlanView
from .compiled_figures import CompiledFigures

_JAX_FRACTION = 0.75  # of a GPU's memory is what JAX takes if it is told nothing
_AGAIN = ("rematted_computation", "rematerialised")  # in names: no work of the model
_MOST_LINES = 3
_LEAST_SAVED = 0.05  # of the memory, for advice to save it
_MOST_PAID = 0.25  # of the step, for memory that already fits
_QUICKER = 1.02  # times, for advice to be quicker


@dataclass(frozen=True)
class Answers:
    """The first questions, and what is at hand to answer them.

    Attributes:
      view: of the plan.
      cluster: what it is for, if that is known.
      memory: what its devices hold, if the step is at hand.
      compiled: what the compiler made of it, or why that is not known.
      tried: other plans that were made of the step.
    """

    view: PlanView
    cluster: Cluster | None = None
    memory: MemoryShares | None = None
    compiled: CompiledFigures | str = ""
    tried: Sequence[TriedPlan] = ()
    batch: Collection[str] = ()  # paths of what holds examples, of a pipeline

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        """Names and answers, in order."""
        yield "fits", self.fits
        yield "speed", self.speed
        if self.memory is not None:
            kinds = sorted(self.memory.kinds, key=lambda each: -each[1])
            yield "holds", ", ".join(f"{n} {format_bytes(b)}" for n, b in kinds)
            lines = sorted(self.memory.lines, key=lambda each: -each[1])
            shown = ", ".join(f"{n} {format_bytes(b)}" for n, b in lines[:_MOST_LINES])
            yield "by line", shown
        if self.tried:
            yield "advice", self.advice

    @property
    def fits(self) -> str:
        """Whether a device holds it, and who says so."""
        predicted, compiled = self.view.predicted, self.compiled
        peak, capacity = predicted.peak_bytes, predicted.budget_bytes
        told = "modelled" if predicted.memory_correction == 1.0 else "compiled once"
        if isinstance(compiled, CompiledFigures) and compiled.peak_bytes:
            peak, told = compiled.peak_bytes, f"compiled for {compiled.target}"
            capacity = compiled.memory_bytes or capacity
        if not capacity and self.cluster is not None:
            capacity = self.cluster.device.memory_bytes
        if not capacity:
            return f"not known: {format_bytes(peak)} a device, {told}"
        word, part = "yes" if peak <= capacity else "no", peak / capacity
        share = f"{part:.0%}" if 0.01 <= part < 10 else f"{part:,.2g} times"
        share = share if part >= 0.01 else "less than 1%"
        held = f"{format_bytes(peak)} of {format_bytes(capacity)} a device"
        return f"{word}: {held} ({share}), {told}{self._setting(peak)}"

    def _setting(self, peak: int) -> str:
        """What JAX on GPUs, which leaves itself a part of the memory, must be told."""
        cluster = self.cluster
        if cluster is None or cluster.device.kind in ("CPU", *SLICES):
            return ""
        is_here = jax.default_backend() == "gpu"  # and says itself what it may take
        if is_here or peak <= _JAX_FRACTION * cluster.device.memory_bytes:
            return ""
        fraction = 1 - RESERVED_FRACTION
        return f", with XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f}"

    @property
    def _replayed(self) -> Replay | None:
        compiled = self.compiled
        return compiled.replayed if isinstance(compiled, CompiledFigures) else None

    @property
    def seconds(self) -> float:
        """Of a step: as compiled, if that was replayed, else as predicted."""
        if self._replayed is not None:
            return self._replayed.seconds
        return self.view.predicted.step_seconds

    @property
    def exposed_seconds(self) -> float:
        """Of the step in which only communication runs."""
        if self._replayed is not None:
            return self._replayed.exposed_seconds
        return self.view.predicted.collective_seconds

    @property
    def speed(self) -> str:
        """Seconds of a step, what it gets through, and what it waits for."""
        seconds = self.seconds
        if not seconds:
            return "a step takes no time"
        words = [f"{format_seconds(seconds)} a step"]
        for noun, number in (("examples", self.examples), ("tokens", self.tokens)):
            words += [f"{_rounded(number / seconds)} {noun}/s"] if number else []
        if self.utilization is not None:
            words.append(f"{self.utilization:.1%} MFU")
        exposed = self.exposed_seconds / seconds
        return f"{', '.join(words)}; {exposed:.1%} is exposed communication"

    @property
    def examples(self) -> int:
        """Examples of a step: dim 0 of what comes in batches."""
        return max((each.shape[0] for each in self._batch), default=0) * self._parts

    @property
    def tokens(self) -> int:
        """Tokens of a step: numbers of a batch that are whole and have two dims."""
        sizes = (
            prod(each.shape)
            for each in self._batch
            if len(each.shape) == 2 and np.issubdtype(each.dtype or "O", np.integer)
        )
        return max(sizes, default=0) * self._parts

    @property
    def _batch(self) -> list[LeafView]:
        leaves = self.view.leaves
        own = (x for x in leaves if x.role == "batch" or x.path in self.batch)
        return [each for each in own if each.shape]

    @property
    def _parts(self) -> int:
        """Stages are given the batch in microbatches."""
        return self.view.stages.num_microbatches if self.view.stages else 1

    @property
    def utilization(self) -> float | None:
        """Part of the devices' FLOPs that products of the model take (MFU).

        What the backward pass makes again does not count (PaLM, appendix B).
        """
        cluster = self.cluster
        if cluster is None or cluster.parts or cluster.device.kind == "CPU":
            return None
        peak = cluster.device.peak_flops
        ideal = 0.0
        for program in self.view.programs:
            dtypes = {t.name: t.dtype for t in program.sharding.tensors}
            for op in program.operators:
                if not op.is_heavy or any(word in op.plan.name for word in _AGAIN):
                    continue
                dtype = dtypes.get(op.plan.name, "float32")
                rate = peak.get(dtype, peak["float32"])
                ideal += op.plan.flops * program.times / rate
        devices = sum(mesh.size for mesh in self.view.meshes)
        return ideal / devices / self.seconds if self.seconds else None

    @property
    def advice(self) -> str:
        """What the best of the other plans would give, at its price."""
        mine, tried = self.view.predicted, list(self.tried)
        fitting = [each for each in tried if _fits(each.predicted, mine)]
        quickest = min(fitting, key=lambda each: each.seconds, default=None)
        if quickest is not None and not _fits(mine, mine):
            need = format_bytes(quickest.predicted.peak_bytes)
            price = _price(quickest.seconds, mine.step_seconds)
            return f"{quickest.title} would fit: it needs {need} {price}."
        if quickest is not None and quickest.seconds * _QUICKER < mine.step_seconds:
            times = mine.step_seconds / quickest.seconds
            return f"{quickest.title} would be {times:.2g}x quicker."
        worth = [
            (each, saved)
            for each in tried
            if (saved := mine.peak_bytes - each.predicted.peak_bytes)
            > _LEAST_SAVED * mine.peak_bytes
            and each.seconds <= (1 + _MOST_PAID) * mine.step_seconds
        ]
        if worth:
            best, saved = max(worth, key=lambda each: each[1])
            price = _price(best.seconds, mine.step_seconds)
            return f"{best.title} would save {format_bytes(saved)} a device {price}."
        number = f"{len(tried)} other plans" if len(tried) > 1 else "the other plan"
        return (
            f"keep it: of {number} that were made none is quicker, or smaller for "
            f"at most {_MOST_PAID:.0%} more time."
        )


def _fits(predicted: Prediction, asked: Prediction) -> bool:
    """Within the budget of the plan at hand."""
    return not asked.budget_bytes or predicted.peak_bytes <= asked.budget_bytes


def _price(seconds: float, mine: float) -> str:
    more = seconds / mine - 1 if mine else 0.0
    return f"for {more:.1%} more time" if more > 0 else "for no more time"


def _rounded(value: float) -> str:
    """Three digits and a unit: `1.23M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:  # as three digits are rounded up to it
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
