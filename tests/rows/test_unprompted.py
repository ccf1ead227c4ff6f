"""Known strategies that the solver finds by itself, and no named method is as fast.

Nothing is given but the step, the cluster and what a device may hold: no pins, no
method and no mesh.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.methods.named_methods import NamedMethod
from autopar.sharding.spec import REPLICATED
from autopar.steps.parallel_plan import Plan
from tests.rows.fixtures import Params, sgd
from tests.rows.moe_models import Experts
from tests.rows.running import homes, traffic
from tests.rows.test_context_parallel import language_model, language_model_step
from tests.rows.test_spatial import spatial_flops, unet_step, unet_types

CLUSTER = autopar.Cluster.preset("8xH100")
GROUPS = (2, 4, 8)  # of devices, in which layers are split
NAMED: tuple[NamedMethod, ...] = (
    autopar.DataParallel(),
    *(autopar.Zero(stage) for stage in (1, 2, 3)),
    autopar.Zero(3, reshard_after_forward=False),
    *(autopar.Megatron(tensor) for tensor in GROUPS),
    *(autopar.Megatron(tensor, sequence=True) for tensor in GROUPS),
)


def planned(step: Any, types: Any, **options: Any) -> Plan:
    options = {"cluster": CLUSTER, **options}
    return autopar.parallelize(step, **options).plan(*types)


def named(step: Any, types: Any, **options: Any) -> Iterator[tuple[str, Plan]]:
    """The plans of all named methods but those that are refused, or fit no device."""
    refused = (autopar.InfeasiblePlanError, NotImplementedError, ValueError)
    for method in NAMED:
        try:
            yield str(method), planned(step, types, method=method, **options)
        except refused:
            continue


def assert_fastest(
    plan: Plan, step: Any, types: Any, least: int, gap: float = 0.01, **given: Any
) -> None:
    """Of so many named methods, or more, that have a plan at all.

    A batch of one leaves few of them; by its bound no other plan on its mesh is faster
    by more than a gap.
    """
    assert plan.predicted.optimality_gap < gap
    others = dict(named(step, types, **given))
    assert len(others) >= least
    seconds = plan.predicted.step_seconds
    slower = [o for o, p in others.items() if p.predicted.step_seconds > seconds]
    assert slower == list(others)


def test_expert_parallelism_for_a_mixture_of_experts() -> None:
    """Experts are split by number, and buffers are exchanged, as GShard annotates."""
    layer = Experts(
        groups=8, tokens=1024, width=1024, experts=16, capacity=128, hidden=4096
    )
    step, types = layer.training_step(), layer.types()
    plan = planned(step, types)
    for name in ("up", "down"):
        assert set(homes(plan)[f"params[{name!r}]"]) == {0}
    exchanged = [
        size
        for (kind, _), sizes in traffic(plan).items()
        for size in sizes
        if kind == "all_to_all"
    ]
    assert exchanged == [layer.experts * 8 * layer.capacity * layer.width * 4 // 8] * 4
    assert_fastest(plan, step, types, least=8)


def test_a_spatial_split_for_one_large_image() -> None:
    step, types = unet_step(), unet_types(1024, 16)
    plan = planned(step, types)
    assert spatial_flops(plan) > 0.9
    assert_fastest(plan, step, types, least=1)
    with pytest.raises(ValueError, match="use a batch that 8 divides"):
        planned(step, types, method=autopar.DataParallel())


def test_context_parallelism_for_one_long_sequence() -> None:
    """By A100s: between H100s permutes are as slow, measured, as gathers are quick."""
    on = {"cluster": autopar.Cluster.preset("1x8xA100")}
    types = language_model(32_768, 2048)
    plan = planned(language_model_step, types, **on)
    kinds = {op.kind: op.factors for op in plan.sharding.operators}
    for kind in ("autopar_attention", "autopar_attention_backward"):
        assert any(factor.startswith("ring") for factor in kinds[kind])
    assert_fastest(plan, language_model_step, types, least=1, **on)
    operators = autopar.ShardParallel(attention="operators")
    hidden = {"up": P(None, "x"), "down": P("x")}
    for options in ({"method": operators}, {"mesh": "x:8", "pins": hidden}):
        other = planned(language_model_step, types, **on, **options)
        assert plan.predicted.step_seconds < other.predicted.step_seconds


def decoder_step(params: Params, tokens: jax.Array) -> tuple[Params, jax.Array]:
    """A layer with 16 heads, on embedded tokens [batch, sequence, width]; SGD."""

    def normalized(x: jax.Array) -> jax.Array:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)

    def loss(params: Params) -> jax.Array:
        heads = (*tokens.shape[:2], 16, tokens.shape[2] // 16)
        y = normalized(tokens)
        q, k, v = ((y @ params[name]).reshape(heads) for name in "qkv")
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = tokens + mixed.reshape(tokens.shape) @ params["out"]
        x = x + jax.nn.gelu(normalized(x) @ params["up"]) @ params["down"]
        return jnp.mean(normalized(x) ** 4)

    value, grads = jax.value_and_grad(loss)(params)
    return sgd(params, grads), value


def decoder_types(batch: int, length: int, width: int) -> tuple[Any, Any]:
    def kind(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    shapes = {name: (width, width) for name in ("q", "k", "v", "out")}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: kind(*shape) for name, shape in shapes.items()}
    return params, kind(batch, length, width)


def test_sequence_parallelism_where_memory_binds() -> None:
    """What lies between layers that are split by heads and hidden units is split along
    the sequence: whole, it does not fit."""
    types = decoder_types(2, 2048, 4096)
    least = planned(decoder_step, types, method=autopar.Megatron(8, sequence=True))
    whole = planned(decoder_step, types, method=autopar.Megatron(8))
    low, high = least.predicted.peak_bytes, whole.predicted.peak_bytes
    assert low < high
    budget = high - 1
    plan = planned(decoder_step, types, memory_budget=budget)
    assert plan.predicted.peak_bytes <= budget
    found = homes(plan)
    axis = found["params['up']"].index(1)  # of the mesh, with a layer's devices
    assert {found[f"params[{name!r}]"][axis] for name in ("q", "k", "v", "up")} == {1}
    assert found["params['down']"][axis] == 0
    assert found["params['out']"][axis] in (0, REPLICATED)  # of a sixth of the bytes
    shape = types[1].shape
    sums = [t for t in plan.sharding.tensors if "/add" in t.name and t.shape == shape]
    assert sums and all(each.spec[axis] == 1 for each in sums)  # the residual stream
    assert_fastest(plan, decoder_step, types, least=2, gap=0.03, memory_budget=budget)
