"""Layout rules of a pipeline: every stage keeps them, as a step of one program does."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.methods.methods import PipelineParallel, ShardParallel
from tests import random_arrays

from .rows.running import run_pipeline_as_planned

normal = partial(random_arrays.normal, scale=0.3)

MESH = "data:2;model:2"
NAMES = {"up": "io hidden", "down": "hidden io", "x": "batch io"}
RULES = autopar.LayoutRules("batch:data;hidden:model", NAMES)
ADAM = optax.adam(1e-2, eps=1e-3)


def perceptron(state: Any, x: jax.Array) -> Any:
    """Layers that go up to 64 and down to 32 again, under Adam."""
    params, opt_state = state

    def loss(params: Any) -> jax.Array:
        y = x
        for layer in params:
            y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
        return jnp.square(y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


def scanned(params: Any, x: jax.Array) -> Any:
    """The same layers in a scan, and plain descent."""

    def loss(params: Any) -> jax.Array:
        def layer(y: jax.Array, w: Any) -> Any:
            return y + jnp.tanh(y @ w["up"]) @ w["down"], None

        y, _ = jax.lax.scan(layer, x, params)
        return jnp.square(y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def layers(number: int) -> list[dict[str, jax.Array]]:
    return [
        {"up": normal(i, 32, 64), "down": normal(10 + i, 64, 32)} for i in range(number)
    ]


def state() -> Any:
    params = layers(2)
    return params, ADAM.init(params)


def homes_of(planned: Any) -> dict[str, tuple[int, ...]]:
    """The spec of every leaf on the stage that it lives on."""
    slots = planned.flow.slots
    return {
        name: spec
        for (name, stage), spec in planned.specs.items()
        if slots[name].kind == "state" and slots[name].stage == stage
    }


def test_every_stage_keeps_the_rules() -> None:
    args = state(), normal(9, 16, 32)
    step = autopar.parallelize(
        perceptron, method=PipelineParallel(2, 2), mesh=MESH, rules=RULES
    )
    compiled = run_pipeline_as_planned(step, *args)
    planned = compiled.lowered.step.pipeline.planned
    homes = homes_of(planned)
    for path, spec in homes.items():
        if path.endswith("['up']"):
            assert spec[1] == 1, path  # axis "model" splits "hidden"
        if path.endswith("['down']"):
            assert spec[1] == 0, path
    assert sum(path.endswith("['up']") for path in homes) == 6  # Adam's moments, too
    sent = {t.slot: (t.source, t.target) for t in planned.transfers()}
    for slot, ends in sent.items():
        for stage in ends:
            if planned.types[slot].shape == (8, 32):  # of a microbatch
                assert planned.specs[slot, stage][0] == 0, slot
                assert planned.specs[slot, stage][1] != 0, slot
    assert any(planned.types[slot].shape == (8, 32) for slot in sent)


def test_the_rules_of_one_program_say_the_same_of_stages() -> None:
    args = state(), normal(9, 16, 32)
    one = autopar.parallelize(
        perceptron, method=ShardParallel(2), mesh="data:4;model:2", rules=RULES
    ).plan(*args)
    whole = {each.path: each.spec for each in one.sharding.inputs}
    staged = autopar.parallelize(
        perceptron, method=PipelineParallel(2, 2), mesh=MESH, rules=RULES
    ).lower(*args)
    found = homes_of(staged.step.pipeline.planned)
    named = {path for path in found if path.endswith(("['up']", "['down']"))}
    assert len(named) == 12
    assert {p: found[p][1] for p in named} == {p: whole[p][1] for p in named}


def test_pieces_of_a_stacked_leaf_keep_the_names_of_its_dims() -> None:
    params = jax.tree.map(lambda *each: jnp.stack(each), *layers(4))
    names = {"params/up": "- io hidden", "params['down']": "- hidden io"}
    rules = autopar.LayoutRules("hidden:model", names)
    step = autopar.parallelize(
        scanned, method=PipelineParallel(2, 2), mesh=MESH, rules=rules
    )
    lowered: Any = step.lower(params, normal(9, 16, 32))
    homes = homes_of(lowered.step.pipeline.planned)
    assert {path: spec[1] for path, spec in homes.items()} == {
        "params['up'][0:2]": 2,
        "params['up'][2:4]": 2,
        "params['down'][0:2]": 1,
        "params['down'][2:4]": 1,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"method": PipelineParallel(2, 4, "zb_h1"), "mesh": MESH, "remat": "full"},
        {
            "method": PipelineParallel(
                2, 2, stage_meshes=["data:2;model:2", "data:1;model:4"]
            )
        },
    ],
    ids=["tasks of weights", "other shapes"],
)
def test_rules_hold_in_all_programs(options: Any) -> None:
    step: Any = autopar.parallelize(perceptron, rules=RULES, **options)
    pipeline = step.lower(state(), normal(9, 16, 32)).step.pipeline
    for piece in pipeline.lowered:
        for leaf in piece.planned.plan.inputs:
            if leaf.path.endswith(("['up']", "['down']")) and len(leaf.shape) == 2:
                wanted = 1 if leaf.path.endswith("['up']") else 0
                assert leaf.spec[1] == wanted, leaf.path


@pytest.mark.parametrize(
    ("rules", "pins", "message"),
    [
        ("batch:rows", None, "may only name axes of the mesh data:2;model:2"),
        ("hidden:model", None, "must be of a name that some argument's dim has"),
        (
            "batch:data",
            {"x": P("model")},
            "must lie as its pin and the method",
        ),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: str, pins: Any, message: str) -> None:
    step = autopar.parallelize(
        perceptron,
        method=PipelineParallel(2, 2),
        mesh=MESH,
        rules=rules,
        pins=pins or {},
    )
    with pytest.raises(ValueError, match=message):
        step.plan(state(), normal(9, 16, 32))
