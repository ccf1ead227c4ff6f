"""The optimizers of the model zoo, by name."""

from collections.abc import Callable

import jax
import optax

from .names import look_up
from .workload import Params


def make_optimizer(
    name: str, learning_rate: float | None = None
) -> optax.GradientTransformation:
    """Return the optimizer called `name`.

    Args:
        name: one of `optimizer_names()`.
        learning_rate: step size, the peak of it where there is a schedule; None
            takes a value that suits the tiny models.

    Raises:
        ValueError: if there is no optimizer of that name.
    """
    make, default_rate = look_up("optimizer", name, _OPTIMIZERS)
    return make(default_rate if learning_rate is None else learning_rate)


def optimizer_names() -> tuple[str, ...]:
    """Return the names that `make_optimizer` knows."""
    return tuple(_OPTIMIZERS)


def _adam(learning_rate: float) -> optax.GradientTransformation:
    return optax.adam(learning_rate)


def _adamw(learning_rate: float) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, weight_decay=0.01)


def _sgd(learning_rate: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=0.9)


def _adafactor(learning_rate: float) -> optax.GradientTransformation:
    # The default threshold, 128, would leave every tiny model unfactored.
    return optax.adafactor(learning_rate, min_dim_size_to_factor=32)


def _adamw_clip(learning_rate: float) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.1 * learning_rate,
        peak_value=learning_rate,
        warmup_steps=10,
        decay_steps=1000,
        end_value=0.1 * learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=_decayed),
    )


def _decayed(params: Params) -> Params:
    """Mark the leaves that weight decay applies to: neither biases nor scales."""

    def is_decayed(path: jax.tree_util.KeyPath, _: jax.Array) -> bool:
        leaf_name = jax.tree_util.keystr(path[-1:], simple=True)
        return leaf_name in ("kernel", "embedding")

    return jax.tree_util.tree_map_with_path(is_decayed, params)


_OPTIMIZERS: dict[
    str, tuple[Callable[[float], optax.GradientTransformation], float]
] = {
    "adamw": (_adamw, 1e-3),
    "adam": (_adam, 1e-3),
    "sgd": (_sgd, 1e-2),
    "adafactor": (_adafactor, 1e-2),
    "adamw_clip": (_adamw_clip, 1e-3),
}
