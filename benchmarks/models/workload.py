"""The two values of the model zoo: a model, and a workload that trains one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Batch = dict[str, jax.Array]
Params = dict[str, Any]
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that one training step reads and returns again.

    `model_state` holds what is updated but not trained (running statistics) and is
    empty for most models; `rng` is a typed key, or None for a deterministic model.
    """

    params: Params
    model_state: Params
    opt_state: Any
    step: jax.Array
    rng: jax.Array | None


@dataclass(frozen=True)
class Model:
    """A model as three pure functions, before an optimizer is chosen.

    `init(key)` returns `(params, model_state)`, `loss(params, model_state, batch,
    rng)` returns the scalar loss and the next model state, and `make_batch(key)`
    returns synthetic data. `needs_rng` says whether `loss` draws random numbers.
    """

    init: Callable[[jax.Array], tuple[Params, Params]]
    loss: Callable[[Params, Params, Batch, jax.Array | None], tuple[jax.Array, Params]]
    make_batch: Callable[[jax.Array], Batch]
    needs_rng: bool = False


@dataclass(frozen=True)
class Workload:
    """Ordinary single-device training code, ready for `jax.jit` or a parallelizer.

    `init(key)` creates the state, `step(state, batch)` returns the next state and a
    dict of scalar metrics, `make_batch(seed)` returns the same data for the same seed.
    """

    name: str
    init: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    make_batch: Callable[[int], Batch]

    def abstract(self) -> tuple[TrainState, Batch]:
        """Return the state and batch as `jax.ShapeDtypeStruct`, allocating nothing."""
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return state, jax.eval_shape(lambda: self.make_batch(0))

    def arguments(self) -> tuple[TrainState, Batch]:
        """Return a state and a batch, the same ones each time."""
        return self.init(jax.random.key(0)), self.make_batch(0)
