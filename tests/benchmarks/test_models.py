"""Every model of the zoo trains under plain `jax.jit` and traces at full size."""

import csv
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.models import Workload, build, gpt, llama, moe, names, vit
from benchmarks.models.optimizers import optimizer_names
from benchmarks.models.workload import Model
from benchmarks.suites import TABLES as FOLDER
from tests.marks import slow

FAMILIES = (
    *("mlp", "gpt", "llama", "bert", "t5", "moe", "lstm", "vit", "resnet", "unet"),
)
# These, too, tests/integration/test_models.py trains in every run.
TRAINED = ("gpt", "bert", "t5", "lstm", "resnet", "unet")

# Compiling takes longer than running here, so compile without optimising.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@functools.cache
def train(name: str, **options: Any) -> tuple[float, float, float]:
    """Return the losses of three steps on one batch."""
    workload = build(name, **options)
    state = workload.init(jax.random.key(0))
    batch = workload.make_batch(0)
    step = jax.jit(workload.step, compiler_options=QUICK)
    state, first = step(state, batch)
    state, second = step(state, batch)
    _, third = step(state, batch)
    return float(first["loss"]), float(second["loss"]), float(third["loss"])


@functools.cache
def initial_loss(make_model: Callable[[Any], Model], config: Any) -> float:
    """Return the loss of the initial parameters of key 0 on one batch."""
    key, model = jax.random.key(0), make_model(config)
    params, model_state = model.init(key)
    loss = jax.jit(model.loss, compiler_options=QUICK)
    return float(loss(params, model_state, model.make_batch(key), key)[0])


def num_parameters(workload: Workload) -> int:
    state, _ = workload.abstract()
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))


def test_the_bare_family_names_are_known() -> None:
    assert set(FAMILIES) <= set(names())


# Others are trained in tests/integration/test_models.py.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "moe", "vit"])
def test_loss_falls(family: str) -> None:
    losses = train(family)
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", optimizer_names())
def test_loss_falls_with_every_optimizer(optimizer: str) -> None:
    losses = train("mlp", optimizer=optimizer)
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mlp", {"bias": False}),
        slow(
            "gpt",
            {
                "scan_layers": True,
                "remat": True,
                "dropout": 0.1,
                "masked_loss": True,
                "compute_dtype": "bfloat16",
            },
        ),
        slow(
            "llama", {"scan_layers": True, "remat": True, "compute_dtype": "bfloat16"}
        ),
    ],
    ids=str,
)
def test_loss_falls_with_options(family: str, options: dict[str, Any]) -> None:
    losses = train(family, **options)
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "other_options"),
    [
        slow({}, {"scan_layers": True}),
        slow({}, {"remat": True, "loss": "optax"}),
        ({"dropout": 0.1, "tied": True}, {"scan_layers": True}),
        slow({"fused_qkv": True}, {"fused_form": "stacked"}),
    ],
    ids=str,
)
def test_forms_of_gpt_are_the_same_function(
    options: dict[str, Any], other_options: dict[str, Any]
) -> None:
    config = replace(gpt.Config.tiny(), **options)
    other = replace(config, **other_options)
    np.testing.assert_allclose(
        initial_loss(gpt.make_model, config),
        initial_loss(gpt.make_model, other),
        rtol=1e-5,
    )


@pytest.mark.slow
def test_forms_of_llama_are_the_same_function() -> None:
    config = llama.Config.tiny()
    unrolled, scanned = config, replace(config, scan_layers=True, remat=True)
    np.testing.assert_allclose(
        initial_loss(llama.make_model, unrolled),
        initial_loss(llama.make_model, scanned),
        rtol=1e-5,
    )


def test_rotated_products_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(0)
    query, key = jnp.asarray(rng.normal(size=(2, 1, 1, 1, 16)), jnp.float32)
    turned = [
        jax.jit(llama.rotate)(jnp.tile(x, (1, 9, 1, 1)), 100.0)[0, :, 0]
        for x in (query, key)
    ]
    products = np.asarray(turned[0] @ turned[1].T)
    np.testing.assert_allclose(products[2:, 2:], products[:-2, :-2], atol=1e-5)
    assert abs(products[0, 5] - products[5, 0]) > 1e-3


def test_grouped_queries_share_a_head_of_keys_and_values() -> None:
    config = replace(llama.Config.tiny(), num_heads=4, num_kv_heads=2, hidden=32)
    whole = replace(config, num_kv_heads=4)
    layer = llama.init_layer(config, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 32))

    def repeated(kernel: jax.Array) -> jax.Array:
        heads = kernel.reshape(32, config.num_kv_heads, config.head_dim)
        return jnp.repeat(heads, 2, axis=1).reshape(32, 32)

    full = {n: {"kernel": repeated(layer[n]["kernel"])} for n in ("key", "value")}
    attention = jax.jit(llama.attention, static_argnums=0)
    np.testing.assert_allclose(
        attention(config, layer, x),
        attention(whole, {**layer, **full}, x),
        rtol=2e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_forms_of_vit_are_the_same_function() -> None:
    conv = vit.Config.tiny()
    reshape = replace(conv, patches="reshape")
    np.testing.assert_allclose(
        initial_loss(vit.make_model, conv),
        initial_loss(vit.make_model, reshape),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        *((family, "adamw") for family in FAMILIES if family not in TRAINED),
        *(slow(family, "adamw") for family in TRAINED),
        *(("mlp", each) for each in optimizer_names() if each != "adamw"),
    ],
)
def test_a_step_in_float32_returns_a_state_like_the_one_it_takes(
    family: str, optimizer: str
) -> None:
    workload = build(family, optimizer=optimizer)
    state, batch = workload.abstract()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    next_state, metrics = jax.eval_shape(workload.step, state, batch)
    assert next_state == state
    assert metrics["loss"].shape == ()


@pytest.mark.parametrize(
    "family",
    [each if each in ("mlp", "lstm") else slow(each) for each in FAMILIES],
)
def test_float64_parameters_stay_float64(family: str) -> None:
    def widen(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = jnp.float64 if leaf.dtype == jnp.float32 else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    with jax.enable_x64(True):
        workload = build(family)
        state, batch = workload.abstract()
        state = jax.tree.map(widen, state)
        next_state, metrics = jax.eval_shape(workload.step, state, batch)
    assert next_state == state
    assert metrics["loss"].dtype == jnp.float64


def test_dropout_draws_anew_at_each_step() -> None:
    options = {"dropout": 0.5, "num_layers": 1, "masked_loss": True}
    losses = train("gpt", optimizer="sgd", learning_rate=0.0, **options)
    assert len(set(losses)) == 3


def test_batch_norm_updates_its_running_statistics_and_the_loss_falls() -> None:
    options = {"block": "bottleneck", "stem": "imagenet", "stage_sizes": (1,)}
    workload = build("resnet", max_pool=True, **options)
    state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
    step = jax.jit(workload.step, compiler_options=QUICK)
    next_state, first = step(state, batch)
    before, after = state.model_state["stem"], next_state.model_state["stem"]
    assert not np.allclose(before["mean"], after["mean"])
    assert step(next_state, batch)[1]["loss"] < first["loss"]


def test_the_gradient_norm_is_a_metric_on_request() -> None:
    workload = build("mlp", grad_norm=True)
    _, metrics = jax.eval_shape(workload.step, *workload.abstract())
    assert sorted(metrics) == ["grad_norm", "loss"]


def test_a_batch_depends_on_the_seed_alone() -> None:
    workload = build("gpt")
    first, again, other = map(workload.make_batch, (1, 1, 2))
    assert np.array_equal(first["tokens"], again["tokens"])
    assert not np.array_equal(first["tokens"], other["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_large_step_traces_without_allocating(scan_layers: bool) -> None:
    workload = build("gpt-125m", scan_layers=scan_layers)
    jaxpr = jax.make_jaxpr(workload.step)(*workload.abstract())
    state, _ = workload.abstract()
    assert len(jaxpr.out_avals) == len(jax.tree.leaves(state)) + 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-125m", 0.165e9),
        slow("gpt-175b", 175e9),
        slow("llama-70b", 70.6e9),
        slow("moe-70b", 70e9),
        ("bert-large", 0.335e9),
        ("vit-base", 0.0866e9),
        ("resnet-50", 0.02556e9),
        slow("wide-resnet-250m", 0.25e9),
        slow("t5-3b", 2.85e9),
        slow("t5-11b", 11.3e9),
        slow("wide-resnet-13b", 13e9),
    ],
)
def test_realistic_sizes_have_their_published_size(name: str, expected: float) -> None:
    assert num_parameters(build(name)) == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(
    ("table", "sizes", "columns"),
    [
        ("gpt", gpt.SIZES, {"hidden": "hidden", "heads": "num_heads"}),
        ("moe", moe.SIZES, {"hidden": "hidden", "experts": "num_experts"}),
    ],
)
def test_every_published_row_has_a_name(
    table: str, sizes: dict[str, Any], columns: dict[str, str]
) -> None:
    path = FOLDER / f"alpa_osdi22_{table}.csv"
    lines = (line for line in path.read_text().splitlines() if line[0] != "#")
    rows = list(csv.DictReader(lines))
    fields = {"layers": "num_layers", **columns}
    for row in rows:
        wanted = {field: int(row[column]) for column, field in fields.items()}
        same = [
            name
            for name, config in sizes.items()
            if all(getattr(config, field) == size for field, size in wanted.items())
        ]
        assert len(same) == 1, wanted
    assert len(rows) >= 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gtp", {}, "did you mean 'gpt'"),
        ("gpt", {"optimizer": "adamW"}, "did you mean 'adamw'"),
        ("gpt", {"num_layer": 3}, "did you mean 'num_layers'"),
        ("gpt", {"num_heads": 7}, "`num_heads` must divide `hidden` 64"),
        ("llama", {"num_kv_heads": 3}, "`num_kv_heads` must divide `num_heads` 8"),
        ("llama", {"num_heads": 64}, "heads of even size, but got 64"),
    ],
)
def test_mistakes_name_the_remedy(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **options)
