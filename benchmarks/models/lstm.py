"""An LSTM language model: stacked layers, each a `lax.scan` over time."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import initializers

from .layers import dense, init_dense, init_embedding
from .losses import cross_entropy
from .synthetic import make_sequences
from .workload import Batch, Model, Params

Carry = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Config:
    """Sizes of the network; the embedding is `hidden` wide as well."""

    vocab_size: int
    seq_len: int
    hidden: int
    batch_size: int
    num_layers: int = 2

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(vocab_size=128, seq_len=16, hidden=64, batch_size=16)


SIZES = {
    "lstm": Config.tiny(),
    "lstm-medium": Config(vocab_size=10000, seq_len=64, hidden=1024, batch_size=128),
    "lstm-large": Config(vocab_size=32000, seq_len=128, hidden=4096, batch_size=512),
}


def make_model(config: Config) -> Model:
    """Return the language model of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, __: (lm_loss(params, batch), {}),
        make_batch=partial(make_batch, config),
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the parameters of the embedding, the cells and the output."""
    embedding_key, layers_key, head_key = jax.random.split(key, 3)
    return {
        "tokens": init_embedding(embedding_key, config.vocab_size, config.hidden),
        "layers": [
            init_cell(config.hidden, layer_key)
            for layer_key in jax.random.split(layers_key, config.num_layers)
        ],
        "head": init_dense(head_key, config.hidden, config.vocab_size),
    }


def init_cell(hidden: int, key: jax.Array) -> Params:
    """Return the kernels from input and state to the four gates, and their bias."""
    input_key, state_key = jax.random.split(key)
    lecun, orthogonal = initializers.lecun_normal(), initializers.orthogonal()
    shape = (hidden, 4 * hidden)
    return {
        "input": {"kernel": lecun(input_key, shape, jnp.float32)},
        "state": {"kernel": orthogonal(state_key, shape, jnp.float32)},
        "bias": jnp.zeros(4 * hidden, jnp.float32),
    }


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the logits `[batch, seq, vocab]` of the token after each of `tokens`."""
    x = params["tokens"]["embedding"][tokens]
    x = x.swapaxes(0, 1)
    for layer in params["layers"]:
        x = run_layer(layer, x)
    return dense(params["head"], x.swapaxes(0, 1))


def run_layer(params: Params, inputs: jax.Array) -> jax.Array:
    """Return the outputs `[seq, batch, hidden]` of a cell run over `inputs`."""
    zeros = jnp.zeros_like(inputs[0])

    def step(carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
        cell, output = lstm_cell(params, carry, x)
        return (cell, output), output

    _, outputs = jax.lax.scan(step, (zeros, zeros), inputs)
    return outputs


def lstm_cell(params: Params, carry: Carry, x: jax.Array) -> Carry:
    """Return the next `(cell, output)` of the cell, each `[batch, hidden]`."""
    cell, output = carry
    gates = x @ params["input"]["kernel"] + output @ params["state"]["kernel"]
    gates = gates + params["bias"]
    enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
    # A forget gate that starts open lets gradients through from the first step.
    cell = jax.nn.sigmoid(forget + 1.0) * cell
    cell = cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
    return cell, jax.nn.sigmoid(leave) * jnp.tanh(cell)


def lm_loss(params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of the next token."""
    return jnp.mean(cross_entropy(forward(params, batch["tokens"]), batch["labels"]))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return tokens and the tokens after them, both `[batch, seq]`."""
    sequences = make_sequences(
        key, config.batch_size, config.seq_len + 1, config.vocab_size
    )
    return {"tokens": sequences[:, :-1], "labels": sequences[:, 1:]}
