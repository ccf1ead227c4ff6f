"""`make demo`: trains a small GPT on virtual devices, and shows plan, audit and proof.

The proof is `jax.jit` on one device, run for the same steps: every loss must agree.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from rich.console import Console

from ..api import parallelize
from ..audit.audit import Audit
from ..steps.lowered_pipeline import PipelineAudit
from .demo_model import Batch, Config, TrainState, init_state, make_train_step

_CORPUS_BYTES = 3_000_000
_NUM_REPORTS = 5  # lines of loss while a run is under way
# Losses of the first steps must agree; later, training amplifies rounding.
_COMPARED_STEPS = 20
_TOLERANCE = 1e-3

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


@dataclass(frozen=True)
class DemoResult:
    """Losses of the parallel run and of `jax.jit`, one a step, and the audit."""

    losses: tuple[float, ...]
    reference: tuple[float, ...]
    audit: Audit | PipelineAudit

    def largest_difference(self, num_steps: int | None = None) -> float:
        """The largest difference of any step's loss, or of the first steps'."""
        mine, other = self.losses[:num_steps], self.reference[:num_steps]
        return float(np.max(np.abs(np.subtract(mine, other))))  # NaN if any is

    @property
    def ok(self) -> bool:
        """Whether the audit passed and the two runs agree."""
        return self.audit.ok and self.largest_difference(_COMPARED_STEPS) <= _TOLERANCE


def run_demo(
    console: Console,
    *,
    steps: int,
    num_devices: int,
    config: Config | None = None,
) -> DemoResult:
    """Plan, audit and train, telling `console` about it.

    Args:
      console: what is printed to.
      steps: training steps, 1 or more.
      num_devices: how many of this process's devices to use.
      config: sizes of the model.

    Raises:
      ValueError: `steps` is not positive.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be 1 or more, but got {steps}; try 100.")
    start = perf_counter()
    config = config or Config()
    corpus = read_corpus()
    state = init_state(config)
    train_step = make_train_step(config)
    step = parallelize(train_step, mesh=_mesh(num_devices))

    def batch_of(index: int) -> Batch:
        return make_batch(corpus, config, index)

    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    console.print(
        f"A GPT of {num_params:,} parameters learns {len(corpus):,} bytes of Python's "
        f"standard library on {num_devices} virtual CPU devices.\n"
    )
    with console.status("planning: how should every operator be split?"):
        plan = step.plan(state, batch_of(0))
    plan.explain()
    with console.status("compiling for all devices"):
        audit = step.lower(state, batch_of(0)).compile().audit()
    console.print()
    console.print(audit)
    losses = _train(f"{num_devices} devices", step, state, batch_of, steps, console)
    state = init_state(config)  # the first one was donated
    reference = _train(
        "jax.jit, 1 device", jax.jit(train_step), state, batch_of, steps, console
    )
    result = DemoResult(losses, reference, audit)
    verdict = "equal up to rounding" if result.ok else "NOT as it should be"
    console.print(
        f"\nautopar on {num_devices} devices ends at a loss of {losses[-1]:.6f}, "
        f"jax.jit on one at {reference[-1]:.6f}; largest difference of any step: "
        f"{result.largest_difference():.1e}, {verdict}.\n(The devices share this "
        f"machine's cores: their speed says nothing of a cluster's.)\nDone in "
        f"{perf_counter() - start:.0f} s."
    )
    return result


def read_corpus() -> np.ndarray:
    """The start of Python's standard library as uint8, the same on every run."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    return np.frombuffer(bytes(text[:_CORPUS_BYTES]), np.uint8)


def make_batch(corpus: np.ndarray, config: Config, index: int) -> dict[str, Any]:
    """Pieces drawn at random from `corpus`, the same for the same `index`."""
    generator = np.random.default_rng(index)
    last = len(corpus) - config.seq_len - 1
    starts = generator.integers(0, last, (config.batch_size, 1))
    pieces = corpus[starts + np.arange(config.seq_len + 1)].astype(np.int32)
    return {"bytes": pieces[:, :-1], "labels": pieces[:, 1:]}


def _mesh(num_devices: int) -> str:
    """Two axes where the devices allow it, so that the solver has a choice."""
    if num_devices >= 4 and num_devices % 2 == 0:
        return f"data:{num_devices // 2};model:2"
    return f"data:{num_devices}"


def _train(
    name: str,
    step: Any,
    state: TrainState,
    batch_of: Callable[[int], Batch],
    steps: int,
    console: Console,
) -> tuple[float, ...]:
    """The loss of every step."""
    losses: list[float] = []
    console.print(f"{name:>18}  compiling")
    for index in range(steps):
        state, metrics = step(state, batch_of(index))
        # Waits for the step: many in flight can deadlock virtual devices.
        losses.append(float(metrics["loss"]))
        if (index + 1) % max(steps // _NUM_REPORTS, 1) == 0 or index == 0:
            console.print(f"{name:>18}  step {index + 1:>4}  loss {losses[-1]:.4f}")
    return tuple(losses)
