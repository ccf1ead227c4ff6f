"""A multilayer perceptron: dense layers with relu between them, mean squared error."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import initializers

from .layers import dense, init_dense
from .workload import Batch, Model, Params


@dataclass(frozen=True)
class Config:
    """Sizes of the network; every layer is `hidden` wide."""

    num_layers: int
    hidden: int
    batch_size: int
    bias: bool = True

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(num_layers=4, hidden=64, batch_size=64)


SIZES = {
    "mlp": Config.tiny(),
    "mlp-100m": Config(num_layers=6, hidden=4096, batch_size=2048),
    "mlp-1b": Config(num_layers=16, hidden=8192, batch_size=4096),
}


def make_model(config: Config) -> Model:
    """Return the perceptron of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, __: (mse_loss(params, batch), {}),
        make_batch=partial(make_batch, config),
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return He-normal kernels and, unless switched off, zero biases."""
    return {
        "layers": [
            init_dense(
                layer_key,
                config.hidden,
                config.hidden,
                kernel_init=initializers.he_normal(),
                bias=config.bias,
            )
            for layer_key in jax.random.split(key, config.num_layers)
        ]
    }


def forward(params: Params, x: jax.Array) -> jax.Array:
    """Return the outputs `[batch, hidden]` for inputs `[batch, hidden]`."""
    *hidden_layers, last_layer = params["layers"]
    for layer in hidden_layers:
        x = jax.nn.relu(dense(layer, x))
    return dense(last_layer, x)


def mse_loss(params: Params, batch: Batch) -> jax.Array:
    """Return the mean squared error over all outputs."""
    return jnp.mean(jnp.square(forward(params, batch["x"]) - batch["y"]))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return Gaussian inputs and a fixed function of them."""
    x = jax.random.normal(key, (config.batch_size, config.hidden), jnp.float32)
    return {"x": x, "y": jnp.sin(x)}
