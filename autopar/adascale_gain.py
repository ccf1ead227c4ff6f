"""AdaScale: how much larger a step of SGD may be where a batch averages noise out.

Johnson, Agrawal, Gu and Guestrin, "AdaScale SGD: A User-Friendly Algorithm for
Distributed Training" (ICML 2020), sections 3.1 to 3.3. All of it is ordinary JAX, so it
runs under `autopar.parallelize`, which splits groups of the batch over the data axis:
each device then holds the gradient of its own group and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class AdaScaleState(NamedTuple):
    """State of `adascale`; all but `inner` are scalars.

    `gain` is that of the last step, from 1 to the number of groups. `gained_steps` is
    the sum of all gains: the steps with one group that this training is worth.
    """

    gain: jax.Array
    gained_steps: jax.Array
    variance: jax.Array
    squared_mean: jax.Array
    inner: Any


class AdaScale(NamedTuple):
    """`init(params)` and `update(updates, state, params)`, as Optax has them."""

    init: Callable[[Any], AdaScaleState]
    update: Callable[..., tuple[Any, AdaScaleState]]


def grouped_value_and_grad(
    loss_fn: Callable[..., jax.Array], num_groups: int
) -> Callable[..., tuple[jax.Array, Any]]:
    """`jax.value_and_grad` of each of equal groups of a batch, which follow each other.

    Args:
      loss_fn: `loss_fn(params, *batch)`, the mean over the examples of `batch`, whose
        leaves share their leading size.
      num_groups: how many groups; as many as the data is split over.

    Returns:
      A function of the same arguments. It returns the loss of the whole batch, and the
      gradients with the groups as a leading dim: [num_groups, ...] for each leaf.

    Raises:
      ValueError: fewer than two groups; when called, groups that do not divide a batch.
    """
    _check_groups(num_groups)

    def grouped(leaf: jax.Array) -> jax.Array:
        if leaf.shape[0] % num_groups:
            raise ValueError(
                f"`num_groups` must divide the batch, but got {num_groups} groups of "
                f"{leaf.shape[0]} examples; use a multiple of {num_groups}."
            )
        return leaf.reshape(num_groups, leaf.shape[0] // num_groups, *leaf.shape[1:])

    def value_and_grad(params: Any, *batch: Any) -> tuple[jax.Array, Any]:
        parts = jax.tree.map(grouped, batch)
        each = jax.vmap(lambda part: jax.value_and_grad(loss_fn)(params, *part))
        losses, grads = each(parts)
        return losses.mean(), grads

    return value_and_grad


def adascale(
    inner: Any,
    num_groups: int,
    *,
    smoothing: float | None = None,
    schedule: Callable[[jax.Array], Any] | None = None,
) -> AdaScale:
    """Scale the updates of SGD by AdaScale's gain.

        optimizer = autopar.adascale(optax.sgd(0.1, momentum=0.9), num_groups=8)
        loss, grads = autopar.grouped_value_and_grad(loss_fn, 8)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)

    The gain is (s + m) / (s / n + m), where s estimates the variance of a group's
    gradient, m the squared norm of the true one, and n is the number of groups: 1 where
    all groups agree, n where they only differ.

    Args:
      inner: the optimizer, as Optax has them, made for a batch of one group; it gets
        the mean gradient. AdaScale is for SGD, with momentum or without.
      num_groups: leading size of the gradients.
      smoothing: what of s and m is kept from step to step; the paper's
        max(1 - num_groups / 1000, 0) if left out.
      schedule: a factor for the updates by `gained_steps`, in which the schedule of a
        batch of one group goes on as it would; the inner learning rate is then 1.

    Raises:
      ValueError: fewer than two groups; a smoothing outside [0, 1).
    """
    _check_groups(num_groups)
    kept = max(1 - num_groups / 1000, 0.0) if smoothing is None else smoothing
    if not 0 <= kept < 1:
        raise ValueError(f"`smoothing` is from 0 to below 1, but got {smoothing}.")

    def init(params: Any) -> AdaScaleState:
        one, *zeros = (jnp.asarray(x, jnp.float32) for x in (1, 0, 0, 0))
        return AdaScaleState(one, zeros[0], zeros[1], zeros[2], inner.init(params))

    def update(
        updates: Any, state: AdaScaleState, params: Any = None
    ) -> tuple[Any, AdaScaleState]:
        mean = jax.tree.map(lambda g: g.mean(0), updates)
        variance, squared_mean = _estimates(updates, mean, num_groups)
        variance = kept * state.variance + (1 - kept) * variance
        squared_mean = kept * state.squared_mean + (1 - kept) * squared_mean
        # Averages that start from zero are too small by one factor, which cancels out.
        gain = _gain(variance, squared_mean, num_groups)
        factor = gain if schedule is None else gain * schedule(state.gained_steps)
        updates, inner_state = inner.update(mean, state.inner, params)
        updates = jax.tree.map(lambda u: (factor * u).astype(u.dtype), updates)
        steps = state.gained_steps + gain
        return updates, AdaScaleState(gain, steps, variance, squared_mean, inner_state)

    return AdaScale(init, update)


def _estimates(grads: Any, mean: Any, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """Of the variance of a group's gradient, and the squared norm of the true one."""
    apart = jax.tree.map(lambda g, m: g - m, grads, mean)
    variance = _squared_norm(apart) / (num_groups - 1)
    return variance, _squared_norm(mean) - variance / num_groups


def _squared_norm(tree: Any) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    ]
    return jnp.asarray(sum(squares))


def _gain(variance: jax.Array, squared_mean: jax.Array, num_groups: int) -> jax.Array:
    """From 1 to `num_groups`; 1 where all gradients are zero."""
    squared_mean = jnp.maximum(squared_mean, 0)  # an estimate may fall below
    below = variance / num_groups + squared_mean
    is_defined = below > 0
    return jnp.where(
        is_defined, (variance + squared_mean) / jnp.where(is_defined, below, 1), 1
    )


def _check_groups(num_groups: int) -> None:
    if num_groups < 2:
        raise ValueError(
            f"AdaScale compares the gradients of 2 groups or more, but got "
            f"num_groups={num_groups}; with one there is no gain."
        )
