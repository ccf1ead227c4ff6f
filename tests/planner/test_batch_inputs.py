"""The batch is what losses are summed over, and no weights that a step only reads."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.frontend.tracing import trace
from autopar.planner.whole_step import roles_of
from tests import random_arrays
from tests.marks import slow

from ..rows.running import run_as_planned, run_pipeline_as_planned

pytestmark = pytest.mark.filterwarnings("ignore:Every device of")  # toys are small
normal = partial(random_arrays.normal, scale=0.25)
WIDTH, BEAMS = 16, 8


def block(hidden: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    inner = jnp.tanh(hidden * weights["scale"] @ weights["up"])
    return hidden + inner @ weights["down"] + weights["bias"]


def weights_of(*layers: int) -> dict[str, jax.Array]:
    return {
        "scale": jnp.ones((*layers, WIDTH)),
        "up": normal(1, *layers, WIDTH, 2 * WIDTH),
        "down": normal(2, *layers, 2 * WIDTH, WIDTH),
        "bias": jnp.ones((*layers, WIDTH)),
    }


def search(model: Any, beams: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One token for each beam; layers in a list, or stacked."""
    hidden = model["embed"][beams["token"]] + beams["hidden"]
    if isinstance(model["layers"], list):
        for weights in model["layers"]:
            hidden = block(hidden, weights)
    else:
        hidden = jax.lax.scan(
            lambda hidden, weights: (block(hidden, weights), None),
            hidden,
            model["layers"],
        )[0]
    token = jnp.argmax(hidden @ model["embed"].T, -1).astype(jnp.int32)
    return {"token": token, "hidden": hidden}


EMBEDDING = normal(0, 40, WIDTH)
MODELS: dict[str, Any] = {
    "list": {"embed": EMBEDDING, "layers": [weights_of(), weights_of()]},
    "stack": {"embed": EMBEDDING, "layers": weights_of(6)},
}
BEAM_STATE = {
    "token": jnp.arange(BEAMS, dtype=jnp.int32),
    "hidden": normal(3, BEAMS, WIDTH),
}


def batch_of(step: Callable[..., Any], *args: Any) -> list[str]:
    traced = trace(step, args, {})
    roles = zip(traced.input_paths, roles_of(traced).roles, strict=True)
    return [path for path, role in roles if role == "batch"]


def test_a_step_of_frozen_weights_and_state_has_no_batch() -> None:
    for model in MODELS.values():
        assert batch_of(search, model, BEAM_STATE) == []
    model = MODELS["list"]
    parallel = autopar.parallelize(search, method=autopar.DataParallel(), mesh="x:8")
    with pytest.raises(ValueError, match="no argument that is batch.*batch_argnums"):
        parallel.plan(model, BEAM_STATE)
    parallel = autopar.parallelize(search, mesh="x:8", num_microbatches=2)
    with pytest.raises(ValueError, match="none was found.*batch_argnums"):
        parallel.plan(model, BEAM_STATE)


def test_state_that_is_named_is_the_batch_beside_frozen_weights() -> None:
    method = autopar.DataParallel()
    step = autopar.parallelize(search, method=method, mesh="x:8", batch_argnums=1)
    plan = run_as_planned(step, MODELS["list"], BEAM_STATE).plan.sharding
    split = {i.path for i in plan.inputs if i.spec[0] == 0}
    assert split == {"beams['hidden']", "beams['token']"}


def test_a_prompt_is_the_batch_beside_weights_of_one_leading_size() -> None:
    """Weights have one leading size too, and it is larger."""

    def sample(
        weights: list[jax.Array], total: jax.Array, prompt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        hidden = prompt
        for each in weights:
            hidden = jnp.tanh(hidden @ each)
        return hidden, total + hidden.sum()

    weights = [normal(seed, WIDTH, WIDTH) for seed in range(2)]
    args = weights, jnp.ones(3), normal(3, 8, WIDTH)
    assert batch_of(sample, *args) == ["prompt"]
    mesh = {"mesh": "x:8", "num_microbatches": 2}
    run_as_planned(autopar.parallelize(sample, **mesh), *args)


def contrastive(left: jax.Array, right: jax.Array) -> jax.Array:
    return -jnp.diag(jax.nn.log_softmax(left @ right.T)).mean()


def decorrelated(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.square(left.T @ right - jnp.eye(WIDTH)).sum()


def normalised(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.square((left - left.mean(0)) / (left.std(0) + 1) - right).mean()


def linear(left: jax.Array, right: jax.Array) -> jax.Array:
    return (left + right).sum()


@pytest.mark.parametrize("loss", [contrastive, decorrelated, normalised, linear])
def test_views_of_examples_stay_the_batch(loss: Callable[..., jax.Array]) -> None:
    """Losses over all examples, and one whose cotangents are the same for each."""

    def step(weight: jax.Array, views: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        def total(weight: jax.Array) -> jax.Array:
            return loss(*(views[name] @ weight @ weight for name in ("left", "right")))

        value, gradient = jax.value_and_grad(total)(weight)
        return weight - 0.1 * gradient, value

    views = {"left": normal(0, 8, WIDTH), "right": normal(1, 8, WIDTH)}
    args = normal(2, WIDTH, WIDTH), views
    assert batch_of(step, *args) == ["views['left']", "views['right']"]


def ints(high: int, *shape: int) -> jax.Array:
    return random_arrays.integers(9, *shape, high=high)


def net(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ params["first"]) @ params["middle"]) @ params["last"]


PARAMS = {
    "first": normal(4, 8, 12),
    "middle": normal(5, 12, 12),
    "last": normal(6, 12, 4),
}


def trained(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    step.__name__ = loss.__name__
    step.__signature__ = inspect.signature(loss)  # type: ignore[attr-defined]
    return step


@trained
def over_times(p: Any, times: Any, paths: Any, targets: Any) -> jax.Array:
    """Every example is a path over the same times, which a loop runs over."""

    def one(path: Any, target: Any) -> jax.Array:
        def move(state: Any, at: Any) -> Any:
            state = jnp.tanh(state + at[0] * (at[1] @ p["first"]))
            return state, state @ p["last"]

        return jax.lax.scan(move, jnp.zeros(12), (times, path))[1] - target

    return jnp.square(jax.vmap(one)(paths, targets)).mean()


@trained
def normalised_data(p: Any, data: Any, chosen: Any) -> jax.Array:
    """A data set on the devices, whose statistics are made of all of it."""
    return jnp.square(net(p, ((data - data.mean(0)) / data.std(0))[chosen])).mean()


@trained
def of_nodes(p: Any, graph: Any, labels: Any) -> jax.Array:
    senders, receivers = graph["edges"]
    hidden = graph["nodes"] @ p["first"]
    for _ in range(2):
        sent = jnp.tanh(hidden @ p["middle"])[senders]
        hidden = hidden + jax.ops.segment_sum(sent, receivers, len(graph["nodes"]))
    return jnp.square(hidden @ p["last"] - labels).mean()


@trained
def of_graphs(p: Any, nodes: Any, edges: Any, graph_of: Any, labels: Any) -> jax.Array:
    hidden = jnp.tanh(nodes @ p["first"])
    sent = jnp.tanh(hidden[edges[0]] @ p["middle"])
    hidden = hidden + jax.ops.segment_sum(sent, edges[1], len(nodes))
    pooled = jax.ops.segment_sum(hidden, graph_of, len(labels))
    return jnp.square(pooled @ p["last"] - labels).mean()


@trained
def prototypes(p: Any, known: Any, kinds: Any, asked: Any, answers: Any) -> jax.Array:
    """What is known makes the classes that what is asked is told apart by."""
    centres = jax.ops.segment_sum(net(p, known), kinds, 5)
    scores = jax.nn.log_softmax(net(p, asked) @ centres.T)
    return -jnp.take_along_axis(scores, answers[:, None], 1).mean()


@trained
def beside_old_weights(p: Any, batch: Any, old: Any, weight: Any) -> jax.Array:
    """What parameters were is summed over, too, but does no work."""
    apart = jax.tree.map(lambda a, b, c: (c * (a - b) ** 2).sum(), p, old, weight)
    return jnp.square(net(p, batch)).mean() + sum(jax.tree.leaves(apart))


@trained
def joined(p: Any, x: Any, y: Any, more: Any) -> jax.Array:
    found = net(p, jnp.concatenate([x, more]))
    return jnp.square(found[: len(x)] - y).mean() + jnp.abs(found[len(x) :]).mean()


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "times": (
        over_times,
        (jnp.linspace(0, 1, 20), normal(7, 16, 20, 8), normal(8, 16, 20, 4)),
        "paths targets",
    ),
    "data set": (normalised_data, (normal(7, 1000, 8), ints(1000, 16)), "chosen"),
    "nodes": (
        of_nodes,
        ({"nodes": normal(7, 24, 8), "edges": ints(24, 2, 60)}, normal(8, 24, 4)),
        "labels",
    ),
    "graphs": (
        of_graphs,
        (normal(7, 24, 8), ints(24, 2, 60), ints(4, 24), normal(8, 4, 4)),
        "labels",
    ),
    "prototypes": (
        prototypes,
        (normal(7, 50, 8), ints(5, 50), normal(8, 20, 8), ints(5, 20)),
        "answers asked",
    ),
    "old weights": (
        beside_old_weights,
        (normal(7, 6, 8), jax.tree.map(jnp.copy, PARAMS), PARAMS),
        "batch",
    ),
    "unlike batches": (
        joined,
        (normal(7, 8, 8), normal(8, 8, 4), normal(9, 20, 8)),
        "more x y",
    ),
}


@pytest.mark.parametrize(("step", "batch", "expected"), CASES.values(), ids=CASES)
def test_the_batch_is_what_losses_are_summed_over(
    step: Callable[..., Any], batch: tuple[Any, ...], expected: str
) -> None:
    names = {path.split("[")[0] for path in batch_of(step, PARAMS, *batch)}
    assert sorted(names) == expected.split()


@pytest.mark.parametrize("size", [20, slow(24)])
def test_batches_of_unlike_sizes_are_cut_alike(size: int) -> None:
    batch = normal(7, 8, 8), normal(8, 8, 4), normal(9, size, 8)
    step = autopar.parallelize(joined, mesh="x:8", num_microbatches=4)
    run_as_planned(step, PARAMS, *batch)
    step = autopar.parallelize(joined, method=autopar.PipelineParallel(2, 4))
    run_pipeline_as_planned(step, PARAMS, *batch)


def test_a_number_of_microbatches_divides_all_batches() -> None:
    batch = normal(7, 8, 8), normal(8, 8, 4), normal(9, 20, 8)
    step = autopar.parallelize(joined, mesh="x:8", num_microbatches=8)
    with pytest.raises(ValueError, match=r"sizes 8 and 20, .* use 2 or 4\. .*more"):
        step(PARAMS, *batch)


def test_a_batch_that_devices_do_not_divide_stays_whole() -> None:
    batch = normal(7, 8, 8), normal(8, 8, 4), normal(9, 20, 8)
    step = autopar.parallelize(joined, method=autopar.DataParallel(), mesh="x:8")
    with pytest.warns(autopar.FallbackWarning, match=r"more is .*\[20,8\] and stays"):
        run_as_planned(step, PARAMS, *batch)


def test_a_tie_tells_what_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    @trained
    def apart(p: Any, inside: Any, border: Any) -> jax.Array:
        return jnp.square(net(p, inside)).mean() + jnp.abs(net(p, border)).mean()

    step = autopar.parallelize(apart, mesh="x:8")
    step.plan(PARAMS, normal(7, 16, 8), normal(8, 9, 8))
    assert "taken to be inside, but" in caplog.text
    assert "may be border; if so, name it with `batch_argnums`" in caplog.text


class TestNamedBatch:
    @staticmethod
    def step(params: Any, batch: Any, batch_of_more: Any) -> Any:
        @trained
        def loss(p: Any) -> jax.Array:
            x = batch["data"][batch["chosen"]["now"]]
            return jnp.square(net(p, x) - batch_of_more).mean()

        return loss(params)

    ARGS = (
        PARAMS,
        {"data": normal(7, 100, 8), "chosen": {"now": ints(100, 16)}},
        normal(8, 16, 4),
    )

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (1, ["batch['chosen']['now']", "batch['data']"]),
            ("batch", ["batch['chosen']['now']", "batch['data']"]),
            ("batch/chosen", ["batch['chosen']['now']"]),
            ("batch['chosen']", ["batch['chosen']['now']"]),
            ("now|more", ["batch['chosen']['now']", "batch_of_more"]),
            (("batch/chosen/now", 2), ["batch['chosen']['now']", "batch_of_more"]),
            ((), []),
        ],
    )
    def test_positions_and_paths(self, given: Any, expected: list[str]) -> None:
        plan = autopar.parallelize(self.step, mesh="x:8", batch_argnums=given)
        inputs = plan.plan(*self.ARGS).sharding.inputs
        assert [each.path for each in inputs if each.role == "batch"] == expected

    def test_a_path_is_cut(self) -> None:
        options = {"num_microbatches": 4, "batch_argnums": "chosen|more"}
        run_as_planned(
            autopar.parallelize(self.step, mesh="x:8", **options), *self.ARGS
        )

    def test_a_name_that_is_none(self) -> None:
        step = autopar.parallelize(self.step, batch_argnums="batch/chose/now")
        with pytest.raises(ValueError, match=r"`batch_argnums` .* did you mean batch"):
            step(*self.ARGS)
        with pytest.raises(TypeError, match=r"or paths of arguments, but got 1\.5"):
            autopar.parallelize(self.step, batch_argnums=1.5)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
def test_arguments_without_examples_are_no_batch_to_be_cut() -> None:
    def step(weights: jax.Array, rows: jax.Array, other: jax.Array) -> jax.Array:
        return weights * (jnp.sum(jnp.square(rows)) + jnp.sum(other))

    args = (jnp.ones(8), jnp.ones((0, 8, 4)), jnp.ones((12, 4)))
    planned = autopar.parallelize(step, donate_argnums=())
    assert jnp.allclose(planned(*args), jax.jit(step)(*args))
