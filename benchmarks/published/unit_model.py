"""Models as rows of units, each in a scope of its own, so that costs can be told apart.

A *unit* is the least that a pipeline stage may hold: an attention, an MLP, a layer of
experts, the embedding, the head. Units that repeat are a group, traced once as the body
of a scan and recomputed in the backward pass. A step of the model runs microbatches in
a loop and adds gradients up in 16 bits; the optimizer is priced apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import gpt, moe
from benchmarks.models.layers import (
    at_least_float32,
    dense,
    init_dense,
    init_embedding,
    init_layer_norm,
    layer_norm,
)
from benchmarks.models.losses import cross_entropy

# One matrix for queries, keys and values, and everything in 16 bits.
_AS_PUBLISHED: dict[str, Any] = {
    "fused_qkv": True,
    "fused_form": "stacked",
    "wide_scores": False,
}

Tree = Any
Apply = Callable[[Tree, Tree, Tree], Tree]  # (params, values so far, batch) -> values


@dataclass(frozen=True)
class Unit:
    """One unit: how its parameters are made, and what it makes of the values so far.

    `experts` and `words` are parameters, by the end of their path, whose dim 0 is split
    over the devices that share out the batch, and over those that share out a layer.
    `is_fused`: its operators are chains that compilers fuse, as those of a transformer
    are; masks of tokens by slots are read by several kernels each, and are not.
    """

    name: str
    init: Callable[[jax.Array], Tree]
    apply: Apply
    experts: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    is_fused: bool = True
    num_experts: int = 0


@dataclass(frozen=True)
class Group:
    """Units that follow each other, `count` times; recomputed as one if `remat`."""

    units: tuple[Unit, ...]
    count: int = 1
    remat: bool = False


@dataclass(frozen=True, eq=False)
class UnitModel:
    """The groups of a model, and what a microbatch of one example looks like.

    The first group takes no values, the last one returns the loss. A microbatch holds a
    multiple of `examples_at_once` on each device. `num_moments` is how many values its
    optimizer keeps for each parameter: two of Adam's. `splits_freely`: shapes that were
    published say nothing of what their axes split. `regrouped` is the same model whose
    experts route so many examples at once; None if it has none.
    """

    name: str
    groups: tuple[Group, ...]
    example: dict[str, jax.ShapeDtypeStruct]
    dtype: str = "float16"
    examples_at_once: int = 1
    units_a_layer: int = 2
    num_moments: int = 2
    splits_freely: bool = False
    regrouped: Callable[[int], UnitModel] | None = None

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Each unit once; its place here is its number in scopes."""
        return tuple(unit for group in self.groups for unit in group.units)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How often each unit comes."""
        return tuple(group.count for group in self.groups for _ in group.units)

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """The units in the order of the model, by number."""
        found: list[int] = []
        start = 0
        for group in self.groups:
            found += list(range(start, start + len(group.units))) * group.count
            start += len(group.units)
        return tuple(found)

    @cached_property
    def params(self) -> dict[str, Tree]:
        """Abstract parameters by scope, stacked where units repeat."""

        def make() -> dict[str, Tree]:
            made, number = {}, 0
            for group in self.groups:
                for unit in group.units:
                    keys = jax.random.split(jax.random.key(0), group.count)
                    init = jax.vmap(unit.init) if group.count > 1 else unit.init
                    made[scope(number)] = init(keys if group.count > 1 else keys[0])
                    number += 1
            return made

        def cast(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, self.dtype)

        return jax.tree.map(cast, jax.eval_shape(make))

    @property
    def state_bytes(self) -> int:
        """Of the optimizer for a parameter: its moments, of 16 bits a copy in 32."""
        moments = 4 * self.num_moments
        return moments if self.itemsize == 4 else moments + 4

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter and of its gradient."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def num_layers(self) -> int:
        """Repeated units in layers."""
        repeated = max(self.groups, key=lambda group: group.count)
        return repeated.count * len(repeated.units) // self.units_a_layer

    @property
    def has_experts(self) -> bool:
        return any(unit.experts for unit in self.units)

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 if it has none."""
        return next((unit.num_experts for unit in self.units if unit.experts), 0)

    @cached_property
    def num_params(self) -> tuple[int, ...]:
        """Parameters of one instance of each unit."""
        return tuple(
            sum(leaf.size for leaf in jax.tree.leaves(self.params[scope(number)]))
            // count
            for number, count in enumerate(self.counts)
        )

    @cached_property
    def border_bytes(self) -> tuple[float, ...]:
        """Bytes that each unit hands on for an example."""
        size, found, values = self.examples_at_once, [], None
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype),
            self.example,
        )
        for number, unit in enumerate(self.units):
            params = self.params[scope(number)]
            if self.counts[number] > 1:
                params = jax.tree.map(
                    lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
                    params,
                )
            values = jax.eval_shape(unit.apply, params, values, batch)
            leaves = jax.tree.leaves(values)
            found.append(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / size)
        return tuple(found)

    def batch(self, num_microbatches: int, size: int) -> dict[str, Any]:
        """Abstract microbatches of `size` examples each."""
        return {
            name: jax.ShapeDtypeStruct(
                (num_microbatches, size, *leaf.shape), leaf.dtype
            )
            for name, leaf in self.example.items()
        }

    def loss(self, params: Tree, batch: Tree) -> jax.Array:
        """The loss of one microbatch."""
        values: Tree = None
        number = 0
        for group in self.groups:
            numbers = range(number, number + len(group.units))
            number += len(group.units)
            names = [scope(each) for each in numbers]
            held = {name: params[name] for name in names}
            with jax.named_scope(names[0]):
                values = _apply_group(group, names, held, values, batch)
        return values

    def step(self, params: Tree, microbatches: Tree) -> Tree:
        """Gradients of all microbatches, added up and put where parameters are."""

        def body(total: Tree, batch: Tree) -> tuple[Tree, None]:
            grads = jax.grad(self.loss)(params, batch)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(body, zeros, microbatches)
        return jax.tree.map(jnp.subtract, params, total)


def scope(number: int) -> str:
    """The name of a unit's scope."""
    return f"unit_{number}"


def _apply_group(
    group: Group, names: Sequence[str], params: Tree, values: Tree, batch: Tree
) -> Tree:
    def once(values: Tree, params: Tree) -> Tree:
        for name, unit in zip(names, group.units, strict=True):
            with jax.named_scope(name):
                values = unit.apply(params[name], values, batch)
        return values

    body = jax.checkpoint(once) if group.remat else once
    if group.count == 1:
        return body(values, params)
    values, _ = jax.lax.scan(lambda v, p: (body(v, p), None), values, params)
    return values


def gpt_units(config: gpt.Config) -> UnitModel:
    """A GPT: embedding, attention and MLP of every layer, head."""
    config = replace(config, **_AS_PUBLISHED)
    layers = Group((_attention(config), _mlp(config)), config.num_layers, remat=True)
    groups = (Group((_embedding(config),)), layers, Group((_head(config),)))
    return UnitModel("gpt", groups, _tokens(config.seq_len))


def moe_units(config: moe.Config) -> UnitModel:
    """A GShard mixture of experts: every second MLP is a layer of experts.

    It is trained by Adafactor, whose factored moments are next to nothing, as published
    (alpa-projects/alpa: benchmark/alpa/benchmark_3d_one_case_moe.py, and for DeepSpeed
    benchmark/deepspeed/patch/training.py).
    """
    decoder = replace(config.decoder, **_AS_PUBLISHED)
    attention = _attention(decoder)
    pair = (attention, _mlp(decoder), attention, *_experts(config))
    groups = (
        Group((_embedding(decoder),)),
        Group(pair, config.num_layers // 2, remat=True),
        Group((_head(decoder),)),
    )
    at_once = max(config.group_size // config.seq_len, 1)

    def regrouped(examples: int) -> UnitModel:
        return moe_units(replace(config, group_size=examples * config.seq_len))

    return UnitModel(
        *("moe", groups, _tokens(config.seq_len)),
        examples_at_once=at_once,
        units_a_layer=len(pair),
        num_moments=0,
        regrouped=regrouped,
    )


def _tokens(seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    row = jax.ShapeDtypeStruct((seq_len,), jnp.int32)
    return {"labels": row, "tokens": row}


def _embedding(config: gpt.Config) -> Unit:
    def init(key: jax.Array) -> Tree:
        return {
            "tokens": init_embedding(key, config.vocab_size, config.hidden),
            "positions": init_embedding(key, config.seq_len, config.hidden),
        }

    def apply(params: Tree, values: Tree, batch: Tree) -> Tree:
        x = params["tokens"]["embedding"][batch["tokens"]]
        return x + params["positions"]["embedding"]

    return Unit("embedding", init, apply, words=("['tokens']['embedding']",))


def _attention(config: gpt.Config) -> Unit:
    def init(key: jax.Array) -> Tree:
        return {
            "norm": init_layer_norm(config.hidden),
            "attention": gpt.init_attention(config, key),
        }

    def apply(params: Tree, x: Tree, batch: Tree) -> Tree:
        normed = layer_norm(params["norm"], x)
        return x + gpt.attention(config, params["attention"], normed, None)

    return Unit("attention", init, apply)


def _mlp(config: gpt.Config) -> Unit:
    width = config.mlp_ratio * config.hidden

    def init(key: jax.Array) -> Tree:
        return {
            "norm": init_layer_norm(config.hidden),
            "up": init_dense(key, config.hidden, width),
            "down": init_dense(key, width, config.hidden),
        }

    def apply(params: Tree, x: Tree, batch: Tree) -> Tree:
        up = jax.nn.gelu(dense(params["up"], layer_norm(params["norm"], x)))
        return x + dense(params["down"], up)

    return Unit("mlp", init, apply)


def _experts(config: moe.Config) -> tuple[Unit, Unit]:
    """Tokens to slots and the first matrix of experts; the second, and back to tokens.

    The balance loss, a scalar beside the values, is left out.
    """

    def init_up(key: jax.Array) -> Tree:
        made = moe.init_experts(config, key)
        norm = init_layer_norm(config.hidden)
        return {"norm": norm, "gate": made["gate"], "up": made["up"]}

    def up(params: Tree, x: Tree, batch: Tree) -> Tree:
        normed = layer_norm(params["norm"], x)
        groups = normed.reshape(-1, config.group_size, config.hidden)
        scores = at_least_float32(dense(params["gate"], groups))
        combine, _ = moe.route(config, jax.nn.softmax(scores))
        combine = combine.astype(x.dtype)
        dispatch = (combine > 0).astype(x.dtype)
        taken = jnp.einsum("gsec,gsm->egcm", dispatch, groups)
        hidden = jnp.einsum("egcm,emh->egch", taken, params["up"])
        return x, combine, jax.nn.relu(hidden)

    def init_down(key: jax.Array) -> Tree:
        return {"down": moe.init_experts(config, key)["down"]}

    def down(params: Tree, values: Tree, batch: Tree) -> Tree:
        x, combine, hidden = values
        given = jnp.einsum("egch,ehm->egcm", hidden, params["down"])
        mixed = jnp.einsum("gsec,egcm->gsm", combine, given)
        return x + mixed.reshape(x.shape)

    number = config.num_experts
    return (
        Unit("experts up", init_up, up, ("['up']",), (), False, number),
        Unit("experts down", init_down, down, ("['down']",), (), False, number),
    )


def _head(config: gpt.Config) -> Unit:
    def init(key: jax.Array) -> Tree:
        return {
            "norm": init_layer_norm(config.hidden),
            "out": init_dense(key, config.hidden, config.vocab_size, bias=False),
        }

    def apply(params: Tree, x: Tree, batch: Tree) -> Tree:
        logits = dense(params["out"], layer_norm(params["norm"], x))
        return jnp.mean(cross_entropy(logits, batch["labels"]))

    return Unit("head", init, apply)
