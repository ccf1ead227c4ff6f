"""Mixtures of experts by einsum dispatch, in groups with a capacity, and as a loop.

Sizes as in GShard: G groups of S tokens of M numbers, E experts of H hidden units, of
which each takes C tokens of each group; a token goes to its best 1 or 2 experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.rows.fixtures import Case, Params, random, sgd


@dataclass(frozen=True)
class Experts:
    """The sizes of a layer, and how many experts a token goes to."""

    groups: int
    tokens: int
    width: int
    experts: int
    capacity: int
    hidden: int
    top: int = 2

    def params(self) -> Params:
        shape = (self.experts, self.width, self.hidden)
        return {
            "gate": random(0, self.width, self.experts, scale=0.5),
            "up": random(1, *shape, scale=0.2),
            "down": random(2, self.experts, self.hidden, self.width, scale=0.2),
        }

    def batch(self) -> Params:
        shape = (self.groups, self.tokens, self.width)
        return {"x": random(3, *shape), "y": random(4, *shape)}

    def combine_weights(self, gates: jax.Array) -> jax.Array:
        """[G, S, E, C]: the weight of each token at its place in an expert, or 0."""
        weights, experts = jax.lax.top_k(gates, self.top)
        weights = weights / weights.sum(-1, keepdims=True) if self.top > 1 else weights
        chosen = jax.nn.one_hot(experts, self.experts)  # [G, S, top, E]
        combine = jnp.zeros((*chosen.shape[:2], self.experts, self.capacity))
        taken = jnp.zeros((len(gates), 1, self.experts))
        for rank in range(self.top):  # all first choices come before any second one
            each = chosen[:, :, rank]
            place = taken + jnp.cumsum(each, axis=1) - each
            slots = jax.nn.one_hot(place.astype(jnp.int32), self.capacity)
            weighted = each * weights[:, :, rank, None]
            combine = combine + slots * weighted[..., None]
            taken = taken + each.sum(1, keepdims=True)
        return combine

    def apply(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tokens [G, S, M] with what the experts add, and the balance loss."""
        gates = jax.nn.softmax(x @ params["gate"])
        combine = self.combine_weights(gates)
        inputs = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
        hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inputs, params["up"]))
        outputs = jnp.einsum("egch,ehm->egcm", hidden, params["down"])
        y = x + jnp.einsum("gsec,egcm->gsm", combine, outputs)
        first = jax.nn.one_hot(gates.argmax(-1), self.experts)
        balance = (first.mean(1) * gates.mean(1)).mean() * self.experts**2
        return y, balance

    def training_step(
        self, balance_weight: float = 0.01
    ) -> Callable[[Params, Params], tuple[Params, jax.Array, jax.Array]]:
        """One SGD step, with the loss and the gradient for x that a stack needs."""

        def step(params: Params, batch: Params) -> tuple[Params, jax.Array, jax.Array]:
            def loss(params: Params, x: jax.Array) -> jax.Array:
                y, balance = self.apply(params, x)
                return jnp.mean((y - batch["y"]) ** 2) + balance_weight * balance

            value, (grads, x_grad) = jax.value_and_grad(loss, (0, 1))(
                params, batch["x"]
            )
            return sgd(params, grads), value, x_grad

        return step

    def training(self) -> Case:
        """The step with arrays."""
        return Case(self.training_step(), (self.params(), self.batch()))

    def types(self) -> tuple[Any, Any]:
        """Types of the parameters and of the batch, for what is planned only."""

        def kind(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        params = {
            "gate": kind(self.width, self.experts),
            "up": kind(self.experts, self.width, self.hidden),
            "down": kind(self.experts, self.hidden, self.width),
        }
        x = kind(self.groups, self.tokens, self.width)
        return params, {"x": x, "y": x}


def looped(
    layer: Experts, params: Params, x: np.ndarray
) -> tuple[np.ndarray, float, np.ndarray]:
    """The layer token by token: its result, its balance loss, and the weights kept."""
    gate, up, down = (np.asarray(params[k], np.float64) for k in ("gate", "up", "down"))
    combine = np.zeros((*x.shape[:2], layer.experts, layer.capacity))
    result, balance = np.array(x, np.float64), 0.0
    for group, tokens in enumerate(np.asarray(x, np.float64)):
        logits = tokens @ gate
        gates = np.exp(logits - logits.max(-1, keepdims=True))
        gates /= gates.sum(-1, keepdims=True)
        ranked = np.argsort(-gates, axis=-1, kind="stable")[:, : layer.top]
        first = np.bincount(ranked[:, 0], minlength=layer.experts) / layer.tokens
        balance += (first * gates.mean(0)).mean() * layer.experts**2 / layer.groups
        taken = [0] * layer.experts
        for rank in range(layer.top):
            for token, experts in enumerate(ranked):
                expert, place = experts[rank], taken[experts[rank]]
                taken[expert] += 1
                if place >= layer.capacity:
                    continue  # dropped: the residual alone goes on
                weight = gates[token, expert]
                if layer.top > 1:
                    weight /= gates[token, experts].sum()
                combine[group, token, expert, place] = weight
                hidden = np.maximum(tokens[token] @ up[expert], 0)
                result[group, token] += weight * (hidden @ down[expert])
    return result, float(balance), combine
