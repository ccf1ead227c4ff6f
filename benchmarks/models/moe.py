"""A GShard mixture of experts: every second block of a GPT routes its tokens.

Tokens are routed in groups, each to the two experts that score best, as one-hot einsums
(https://arxiv.org/abs/2006.16668, algorithm 1): an expert takes at most its capacity of
each group, and what is over passes by the residual alone.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp

from . import gpt
from .layers import (
    at_least_float32,
    dense,
    init_dense,
    init_embedding,
    init_layer_norm,
    layer_norm,
)
from .losses import cross_entropy
from .workload import Batch, Model, Params


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder and its experts.

    Args:
        group_size: tokens that are routed together; it divides those of the batch.
        capacity_factor: slots of an expert over what it gets if all get the same.
        balance_weight: of the loss that keeps experts equally busy.
        tied: project to logits with the token embedding.
        mlp_ratio: width of MLPs and experts over `hidden`.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    hidden: int
    num_heads: int
    batch_size: int
    num_experts: int
    group_size: int
    capacity_factor: float = 1.0
    balance_weight: float = 0.01
    tied: bool = False
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        if self.batch_size * self.seq_len % self.group_size:
            raise ValueError(
                f"`group_size` must divide the {self.batch_size * self.seq_len} tokens "
                f"of a batch, but got {self.group_size}; change one of them."
            )

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(
            vocab_size=128,
            seq_len=32,
            num_layers=2,
            hidden=64,
            num_heads=8,
            batch_size=16,
            num_experts=8,
            group_size=32,
        )

    @property
    def capacity(self) -> int:
        """Tokens of one group that an expert takes at most."""
        return int(2 * self.group_size / self.num_experts * self.capacity_factor)

    @property
    def decoder(self) -> gpt.Config:
        """The sizes of the blocks around the experts."""
        return gpt.Config(
            self.vocab_size,
            self.seq_len,
            self.num_layers,
            self.hidden,
            self.num_heads,
            self.batch_size,
            tied=self.tied,
            mlp_ratio=self.mlp_ratio,
        )


def _sized(num_layers: int, hidden: int, num_experts: int) -> Config:
    return replace(
        Config.tiny(),
        vocab_size=32000,
        seq_len=1024,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=16,
        batch_size=1024,
        num_experts=num_experts,
        group_size=2048,
        tied=True,
        mlp_ratio=8,
    )


# The sizes of the Alpa benchmarks (benchmark/alpa/suite_manual_moe.py).
SIZES = {
    "moe": Config.tiny(),
    "moe-380m": _sized(num_layers=8, hidden=768, num_experts=8),
    "moe-690m": _sized(num_layers=8, hidden=768, num_experts=16),
    "moe-1.3b": _sized(num_layers=16, hidden=768, num_experts=16),
    "moe-2.4b": _sized(num_layers=16, hidden=1024, num_experts=16),
    "moe-10b": _sized(num_layers=16, hidden=1536, num_experts=32),
    "moe-27b": _sized(num_layers=16, hidden=2048, num_experts=48),
    "moe-70b": _sized(num_layers=32, hidden=2048, num_experts=64),
}


def make_model(config: Config) -> Model:
    """Return the mixture of experts of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, __: (lm_loss(config, params, batch), {}),
        make_batch=partial(gpt.make_batch, config.decoder),
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the parameters; every second layer has experts in place of an MLP."""
    token_key, position_key, layers_key, head_key = jax.random.split(key, 4)
    layers: list[Params] = []
    for index, layer_key in enumerate(jax.random.split(layers_key, config.num_layers)):
        block_key, experts_key = jax.random.split(layer_key)
        layer = gpt.init_layer(config.decoder, block_key)
        if index % 2:
            del layer["mlp_up"], layer["mlp_down"]
            layer["experts"] = init_experts(config, experts_key)
        layers.append(layer)
    params = {
        "tokens": init_embedding(token_key, config.vocab_size, config.hidden),
        "positions": init_embedding(position_key, config.seq_len, config.hidden),
        "layers": layers,
        "final_norm": init_layer_norm(config.hidden),
    }
    if not config.tied:
        params["head"] = init_dense(
            head_key, config.hidden, config.vocab_size, bias=False
        )
    return params


def init_experts(config: Config, key: jax.Array) -> Params:
    """Return the gate and the two matrices of every expert, `[expert, in, out]`."""
    gate_key, up_key, down_key = jax.random.split(key, 3)
    experts, hidden = config.num_experts, config.hidden
    width = config.mlp_ratio * hidden

    def init(key: jax.Array, *shape: int) -> jax.Array:
        matrix = (prod(shape[:-1]), shape[-1])
        return 0.02 * jax.random.normal(key, matrix, jnp.float32).reshape(shape)

    return {
        "gate": init_dense(gate_key, hidden, experts, bias=False),
        "up": init(up_key, experts, hidden, width),
        "down": init(down_key, experts, width, hidden),
    }


def forward(
    config: Config, params: Params, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the logits `[batch, seq, vocab]`, and the balance loss of all layers."""
    positions = jnp.arange(tokens.shape[1])
    x = params["tokens"]["embedding"][tokens]
    x = x + params["positions"]["embedding"][positions]
    balance = jnp.zeros((), jnp.float32)
    for layer in params["layers"]:
        if "experts" not in layer:
            x = gpt.apply_layer(config.decoder, x, layer, None)
            continue
        normed = layer_norm(layer["attention_norm"], x)
        x = x + gpt.attention(config.decoder, layer["attention"], normed, None)
        normed = layer_norm(layer["mlp_norm"], x)
        mixed, layer_balance = apply_experts(config, layer["experts"], normed)
        x, balance = x + mixed, balance + layer_balance
    x = layer_norm(params["final_norm"], x)
    if config.tied:
        return x @ params["tokens"]["embedding"].T, balance
    return dense(params["head"], x), balance


def apply_experts(
    config: Config, params: Params, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the mixed outputs of two experts a token, and how unbalanced they are."""
    groups = x.reshape(-1, config.group_size, config.hidden)
    scores = at_least_float32(dense(params["gate"], groups))
    combine, balance = route(config, jax.nn.softmax(scores))
    combine = combine.astype(x.dtype)
    dispatch = (combine > 0).astype(x.dtype)
    taken = jnp.einsum("gsec,gsm->egcm", dispatch, groups)
    hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", taken, params["up"]))
    given = jnp.einsum("egch,ehm->egcm", hidden, params["down"])
    mixed = jnp.einsum("gsec,egcm->gsm", combine, given)
    return mixed.reshape(x.shape), balance


def route(config: Config, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weight of every token in every slot of the two experts it goes to.

    Args:
        gates: probabilities, `[group, token, expert]`.

    Returns:
        Weights `[group, token, expert, slot]`, and the balance loss, 1 at best.
    """
    experts = config.num_experts
    first = jax.nn.one_hot(jnp.argmax(gates, -1), experts, dtype=gates.dtype)
    others = gates * (1 - first)
    second = jax.nn.one_hot(jnp.argmax(others, -1), experts, dtype=gates.dtype)
    balance = experts * jnp.mean(
        jnp.sum(jnp.mean(first, 1) * jnp.mean(gates, 1), axis=-1)
    )
    first_slot = jnp.cumsum(first, 1) - first
    second_slot = jnp.cumsum(second, 1) - second + jnp.sum(first, 1, keepdims=True)
    total = jnp.sum(gates * (first + second), -1, keepdims=True) + 1e-9
    weights = []
    for chosen, slots in ((first, first_slot), (second, second_slot)):
        slot = jnp.sum(slots * chosen, -1)
        kept = chosen * (slot < config.capacity)[..., None]
        places = jax.nn.one_hot(slot.astype(jnp.int32), config.capacity)
        weights.append((gates * kept / total)[..., None] * places[:, :, None, :])
    return weights[0] + weights[1], balance


def lm_loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of the next token, and a part of the balance."""
    logits, balance = forward(config, params, batch["tokens"])
    losses = cross_entropy(logits, batch["labels"])
    return jnp.mean(losses) + config.balance_weight * balance
