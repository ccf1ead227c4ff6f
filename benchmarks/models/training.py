"""The train step: gradients of a model's loss, an optax update, metrics."""

import jax
import jax.numpy as jnp
import optax

from .workload import Batch, Metrics, Model, TrainState, Workload


def make_workload(
    name: str,
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    grad_norm: bool = False,
) -> Workload:
    """Return the workload that trains `model` with `optimizer`.

    With `grad_norm` the metrics hold the global norm of the gradients as well.
    """

    def init(key: jax.Array) -> TrainState:
        params_key, rng = jax.random.split(key)
        params, model_state = model.init(params_key)
        return TrainState(
            params=params,
            model_state=model_state,
            opt_state=optimizer.init(params),
            step=jnp.zeros((), jnp.int32),
            rng=rng if model.needs_rng else None,
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng, loss_rng = None, None
        if state.rng is not None:
            rng, loss_rng = jax.random.split(state.rng)
        loss_and_grad = jax.value_and_grad(model.loss, has_aux=True)
        (loss, model_state), grads = loss_and_grad(
            state.params, state.model_state, batch, loss_rng
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        metrics = {"loss": loss}
        if grad_norm:
            metrics["grad_norm"] = optax.global_norm(grads)
        state = state._replace(
            params=optax.apply_updates(state.params, updates),
            model_state=model_state,
            opt_state=opt_state,
            step=state.step + 1,
            rng=rng,
        )
        return state, metrics

    def make_batch(seed: int) -> Batch:
        return model.make_batch(jax.random.key(seed))

    return Workload(name=name, init=init, step=train_step, make_batch=make_batch)
