"""What the backward pass makes again: the same values with less memory."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import autopar
from autopar.lowering.memory_use import MemoryUse
from autopar.option_values import LEVELS, Remat
from autopar.rematerialisation.segments import fewest_bytes
from autopar.steps.lowered_step import Compiled, Lowered
from tests.marks import slow
from tests.residuals import residual_bytes
from tests.rows.fixtures import Case, random
from tests.rows.running import run_as_planned

WIDTH, NUM_LAYERS = 32, 6


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("x",))


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sin(x) @ kernel)


def unrolled(
    batch: int = 1024, inner: Callable[..., Any] = layer, num_layers: int = NUM_LAYERS
) -> Case:
    """Layers with more activations than anything else; plain gradient descent."""

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            hidden = x
            for kernel in params:
                hidden = inner(hidden, kernel)
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = [random(i, WIDTH, WIDTH, scale=0.3) for i in range(num_layers)]
    return Case(step, (params, random(9, batch, WIDTH)))


def few_layers() -> Case:
    """As few as are cut into segments, for values rather than for memory."""
    return unrolled(batch=64, num_layers=3)


def lowered_on_one_device(case: Case, **options: Any) -> Lowered:
    step = autopar.parallelize(case.step, mesh=one_device(), **options)
    return cast("Lowered", step.lower(*case.args))


def compiled_on_one_device(case: Case, **options: Any) -> Compiled:
    return lowered_on_one_device(case, **options).compile()


@cache
def compiled_layers(remat: str | None) -> Compiled:
    return compiled_on_one_device(unrolled(), remat=remat)


def device_bytes(compiled: Compiled) -> int:
    return MemoryUse.of(compiled.compiled).device_bytes


@pytest.mark.parametrize("remat", ["cheap", "full"])
def test_unrolled_layers_take_less_memory_as_compiled(remat: str) -> None:
    plain, again = compiled_layers(None), compiled_layers(remat)
    kept = (residual_bytes(each.lowered.graph) for each in (plain, again))
    assert next(kept) > 1.5 * next(kept)
    assert device_bytes(again) < 0.85 * device_bytes(plain)
    for each in (plain, again):
        predicted = each.plan.predicted.peak_bytes
        assert predicted == pytest.approx(device_bytes(each), rel=0.25)


def test_memory_of_layers_with_a_users_checkpoint_is_predicted() -> None:
    again = compiled_on_one_device(unrolled(inner=jax.checkpoint(layer)))
    predicted = again.plan.predicted.peak_bytes
    assert predicted == pytest.approx(device_bytes(again), rel=0.25)


@pytest.mark.parametrize("remat", ["cheap", slow("full"), slow("full:2")])
def test_values_are_equal_on_split_layers(remat: str) -> None:
    case = few_layers()
    step = autopar.parallelize(case.step, mesh="data:2;model:4", remat=remat)
    compiled = run_as_planned(step, *case.args)
    assert compiled.plan.sharding.remat == remat


def test_only_the_first_segments_are_done_again() -> None:
    def kept(remat: str) -> int:
        return residual_bytes(lowered_on_one_device(unrolled(), remat=remat).graph)

    found = [kept(remat) for remat in ("full:1", "full:2", "full")]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3


def dropped(scan: bool) -> Case:
    """Layers with dropout, in a loop or not; bits are of a key and a number."""

    def step(params: Any, key: jax.Array, x: jax.Array) -> tuple[Any, jax.Array]:
        def body(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
            kernel, number = given
            keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, x.shape)
            return jnp.where(keep, layer(x, kernel), 0.0), None

        def loss(params: Any) -> jax.Array:
            numbers = jnp.arange(len(params))
            if scan:
                final, _ = jax.lax.scan(body, x, (params, numbers))
            else:
                final = x
                for i in range(len(params)):
                    final, _ = body(final, (params[i], numbers[i]))
            return jnp.mean(final**2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    params = random(0, 3, WIDTH, WIDTH, scale=0.3)
    return Case(step, (params, jax.random.key(3), random(9, 64, WIDTH)))


@pytest.mark.parametrize("scan", [True, slow(False)])
def test_random_bits_are_the_same_again(scan: bool) -> None:
    case = dropped(scan)
    step = autopar.parallelize(case.step, mesh="data:8", remat="full")
    run_as_planned(step, *case.args)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_in_microbatches(scan: bool) -> None:
    case = scanned() if scan else few_layers()
    step = autopar.parallelize(
        case.step, mesh="data:8", num_microbatches=4, remat="full"
    )
    compiled = run_as_planned(step, *case.args)
    assert compiled.plan.sharding.remat == "full"


def scanned(checkpoint: bool = False) -> Case:
    def step(params: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        inner = jax.checkpoint(layer) if checkpoint else layer

        def loss(params: jax.Array) -> jax.Array:
            final, _ = jax.lax.scan(lambda x, k: (inner(x, k), None), x, params)
            return jnp.mean(final**2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    params = random(0, NUM_LAYERS, WIDTH, WIDTH, scale=0.3)
    return Case(step, (params, random(9, 64, WIDTH)))


def test_a_loop_keeps_what_enters_its_layers() -> None:
    again = lowered_on_one_device(scanned(), remat="full")
    by_hand = lowered_on_one_device(scanned(checkpoint=True))
    assert residual_bytes(again.graph) == residual_bytes(by_hand.graph)


def test_where_the_step_does_so_itself_there_is_nothing_to_do() -> None:
    with pytest.raises(ValueError, match=r"jax\.checkpoint is there already"):
        lowered_on_one_device(scanned(checkpoint=True), remat="full")


def test_without_gradients_there_is_nothing_to_do() -> None:
    step = autopar.parallelize(layer, remat="full")
    with pytest.raises(ValueError, match="nothing is differentiated"):
        step.plan(jnp.ones((8, WIDTH)), jnp.ones((WIDTH, WIDTH)))


def test_a_callback_is_not_called_again() -> None:
    called: list[int] = []

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            hidden = x
            for kernel in params:
                hidden = layer(hidden, kernel)
                jax.debug.callback(lambda: called.append(1))
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    case = few_layers()
    run = autopar.parallelize(step, mesh=one_device(), remat="full")
    jax.block_until_ready(run(*case.args))
    jax.effects_barrier()
    assert len(called) == len(case.args[0])


def test_a_plan_file_says_what_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = few_layers()
    plan = autopar.parallelize(case.step, mesh="data:8", remat="full:2").plan(
        *case.args
    )
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.sharding == plan.sharding
    run_as_planned(autopar.parallelize(case.step, plan=loaded), *case.args)
    loaded.explain()
    assert "full:2" in capsys.readouterr().out
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("full:2", "half"))
    with pytest.raises(autopar.PlanFileError, match="remat"):
        autopar.Plan.load(tmp_path / "plan.json")


def test_auto_takes_nothing_that_the_budget_does_not_ask_for() -> None:
    plain = compiled_layers(None)
    peak = max(plain.plan.predicted.peak_bytes, device_bytes(plain))
    enough = lowered_on_one_device(unrolled(), remat="auto", memory_budget=peak)
    assert enough.plan.sharding.remat == ""
    tight = compiled_on_one_device(unrolled(), remat="auto", memory_budget=peak - 1)
    assert tight.plan.sharding.remat.endswith(":1")
    assert device_bytes(tight) < peak
    assert tight.plan.predicted.step_seconds > plain.plan.predicted.step_seconds


@pytest.mark.parametrize("level", LEVELS)
def test_texts_come_back(level: Any) -> None:
    for number in (None, 1, 12):
        remat = Remat(level, number)
        assert Remat.parse(str(remat)) == remat


@pytest.mark.parametrize("given", ["half", "full:0", "full:", "auto:2", ""])
def test_what_says_nothing_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="selective, cheap, full"):
        autopar.parallelize(layer, remat=given)


def test_other_types_and_places_are_refused() -> None:
    with pytest.raises(ValueError, match="must be None, auto or one of"):
        autopar.parallelize(layer, remat=True)  # type: ignore[arg-type]
    case = scanned()
    plan = autopar.parallelize(case.step).plan(*case.args)
    with pytest.raises(ValueError, match="left out with `plan`"):
        autopar.parallelize(case.step, plan=plan, remat="full")


def most_held(held: np.ndarray, chosen: Sequence[int]) -> float:
    ends = [0, *chosen, len(held) - 1]
    return max(held[b] - held[a] for a, b in pairwise(ends))


def test_borders_are_the_best_of_all() -> None:
    """Against every set of borders, for the fewest bytes under each limit."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = [0, *sorted(rng.choice(range(1, 20), 6, replace=False)), 20]
        crossing = rng.integers(1, 50, 21).tolist()
        held = np.cumsum([0, *rng.integers(0, 30, 20)])
        inside = [held[b] - held[a] for a, b in pairwise(points)]
        limit = float(rng.integers(max(inside), held[-1] + 1))

        sets = (s for n in range(7) for s in combinations(points[1:-1], n))
        within = [s for s in sets if most_held(held, s) <= limit]
        best = min(sum(crossing[p] for p in s) for s in within)
        found = fewest_bytes(points, crossing, held, limit)
        assert most_held(held, found) <= limit
        assert sum(crossing[p] for p in found) == best


def test_gradients_do_not_wait_until_all_is_made_again() -> None:
    """Compilers may make gradients of weights as late as they can, and keep for them
    what was made again of every layer: there must be no more of it than of one."""

    def block(x: jax.Array, w: Any) -> jax.Array:
        heads = (x * w["scale"] @ w["in"]).reshape(8, 128, 64)
        mixed = jax.nn.softmax(heads @ heads.swapaxes(1, 2) / 8) @ heads
        x = x + mixed.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"]

    def step(layers: Any, x: jax.Array) -> Any:
        def loss(layers: Any) -> jax.Array:
            hidden = x
            for each in layers:
                hidden = block(hidden, each)
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(layers)
        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value

    sizes = {"in": (64, 64), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    vectors = {"scale": jnp.ones(64), "bias": jnp.zeros(256)}
    layers = [
        {name: random(i, *size, scale=0.1) for name, size in sizes.items()} | vectors
        for i in range(3)
    ]
    case = Case(step, (layers, random(9, 1024, 64)))
    plain = lowered_on_one_device(case).plan.predicted.peak_bytes
    again = compiled_on_one_device(case, remat="full")
    predicted = again.plan.predicted.peak_bytes
    assert predicted == pytest.approx(device_bytes(again), rel=0.25)
    assert device_bytes(again) < 0.5 * plain
