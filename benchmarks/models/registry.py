"""Builds a workload from the name of a model and the name of an optimizer."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from . import (
    bert,
    gpt,
    llama,
    lstm,
    mlp,
    moe,
    resnet,
    t5,
    unet,
    vit,
)
from .names import look_up
from .optimizers import make_optimizer
from .training import make_workload
from .workload import Model, Workload

_MODULES = (mlp, gpt, llama, bert, t5, moe, lstm, vit, resnet, unet)

_MODELS: dict[str, tuple[Any, Callable[[Any], Model]]] = {
    name: (config, module.make_model)
    for module in _MODULES
    for name, config in module.SIZES.items()
}


def build(
    name: str,
    *,
    optimizer: str = "adamw",
    learning_rate: float | None = None,
    grad_norm: bool = False,
    **options: Any,
) -> Workload:
    """Return the training code of a model.

    Args:
        name: one of `names()`; a bare family name ("gpt") is its tiny size.
        optimizer: adamw, adam, sgd, adafactor or adamw_clip.
        learning_rate: None takes the optimizer's value for the tiny models.
        grad_norm: add the global norm of the gradients to the metrics.
        options: fields of the model's `Config` to change, such as
            `num_layers=4` or `scan_layers=True`.

    Raises:
        ValueError: if a name or an option is unknown, or the sizes do not fit.

    Example:
        >>> workload = build("gpt", optimizer="sgd", scan_layers=True)
        >>> state_spec, batch_spec = workload.abstract()
        >>> batch_spec["tokens"].shape
        (16, 32)
    """
    config, make_model = look_up("model", name, _MODELS)
    option_names = {field.name: field.name for field in fields(config)}
    for option in options:
        look_up(f"option of {name!r}", option, option_names)
    model = make_model(replace(config, **options))
    transformation = make_optimizer(optimizer, learning_rate)
    return make_workload(name, model, transformation, grad_norm=grad_norm)


def names() -> tuple[str, ...]:
    """Return the names that `build` knows."""
    return tuple(_MODELS)
