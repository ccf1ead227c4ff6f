"""A train step of a tied, clipped MLP: whole on one device, and by hand as a pipeline.

Layer i is `tanh(x @ w_i)`; a scale shared by the first and the last layer is a tied
parameter; the update is clipped by the norm of all gradients. So state, gradients and
scalars all cross stages, beside activations and cotangents.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.lowering.programs import PipelineProgram, Slot, StageProgram
from autopar.plans.plan import TaskKind

BATCH, WIDTH, RATE = 16, 8, 0.1


def initial_state(num_stages: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    weights = {
        f"w{i}": random.normal(size=(WIDTH, WIDTH)).astype(np.float32)
        for i in range(num_stages)
    }
    return {**weights, "scale": random.normal(size=WIDTH).astype(np.float32)}


def make_batch(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.normal(size=(BATCH, WIDTH)).astype(np.float32)
        for name in ("x", "y")
    }


def microbatches(batch: dict[str, np.ndarray], number: int) -> dict[str, list[Any]]:
    return {name: np.split(array, number) for name, array in batch.items()}


def _layer(i: int, last: int, w: Any, scale: Any, x: Any) -> Any:
    x = jnp.tanh(x @ w)
    return x * scale if i in (0, last) else x


def _loss(prediction: Any, y: Any) -> Any:
    return jnp.sum((prediction - y) ** 2) / BATCH


def single_device_step(
    state: dict[str, Any], batch: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    last = len(state) - 2

    def loss(state: dict[str, Any]) -> tuple[Any, Any]:
        x = batch["x"]
        for i in range(last + 1):
            x = _layer(i, last, state[f"w{i}"], state["scale"], x)
        return _loss(x, batch["y"]), x

    (value, prediction), gradients = jax.value_and_grad(loss, has_aux=True)(state)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients.values()))
    new_state = {k: _clipped(state[k], gradients[k], norm) for k in state}
    return new_state, {"loss": value, "prediction": prediction}


def _clipped(w: Any, gradient: Any, norm: Any) -> Any:
    return w - RATE * gradient / jnp.maximum(norm, 1.0)


class PipelineBuilder:
    """Collects slots and programs; `specs` says how a stage splits its activations."""

    def __init__(
        self, meshes: Sequence[Mesh], specs: Sequence[PartitionSpec], number: int
    ) -> None:
        self.meshes, self.specs, self.number = meshes, specs, number
        self.slots: dict[str, Slot] = {}
        self.programs: list[StageProgram] = []
        self.shardings: dict[tuple[str, int], NamedSharding] = {}
        self.zeros: dict[str, Callable[[], Any]] = {}

    def slot(self, name: str, kind: Any, stage: int) -> str:
        self.slots[name] = Slot(name, kind, stage)
        return name

    def gradient(self, name: str, stage: int, shape: tuple[int, ...]) -> str:
        sharding = NamedSharding(self.meshes[stage], PartitionSpec())
        self.zeros[name] = jax.jit(lambda: jnp.zeros(shape), out_shardings=sharding)
        return self.slot(name, "gradient", stage)

    def add(
        self,
        stage: int,
        kind: TaskKind,
        function: Callable[..., Any],
        inputs: Sequence[str],
        outputs: Sequence[str],
        donated: Sequence[str] = (),
    ) -> None:
        """A program; activations and batches are split, everything else is whole."""

        def sharding(name: str) -> NamedSharding:
            is_split = name.split()[0] in ("x", "y", "out", "cot", "prediction")
            spec = self.specs[stage] if is_split else PartitionSpec()
            home = NamedSharding(self.meshes[stage], spec)
            return self.shardings.setdefault((name, stage), home)

        positions = tuple(inputs.index(name) for name in donated)
        jitted = jax.jit(
            function,
            in_shardings=tuple(map(sharding, inputs)),
            out_shardings=tuple(map(sharding, outputs)),
            donate_argnums=positions,
        )
        self.programs.append(
            StageProgram(
                stage,
                kind,
                tuple(inputs),
                tuple(outputs),
                lambda arrays: jitted(*arrays),
                positions,
            )
        )

    def build(self) -> PipelineProgram:
        return PipelineProgram(
            len(self.meshes),
            self.number,
            self.slots,
            tuple(self.programs),
            self.shardings,
            self.zeros,
        )


def mlp_pipeline(
    meshes: Sequence[Mesh], specs: Sequence[PartitionSpec], num_microbatches: int
) -> PipelineProgram:
    """The step of `single_device_step`, a layer a stage."""
    b = PipelineBuilder(meshes, specs, num_microbatches)
    last = len(meshes) - 1
    b.slot("scale", "state", 0)
    b.slot("x", "batch", 0)
    b.slot("y", "batch", last)
    b.slot("prediction", "result", last)
    b.slot("loss", "result", last)
    b.gradient("total", last, ())
    for i in range(last + 1):
        b.slot(f"w{i}", "state", i)
        b.gradient(f"grad {i}", i, (WIDTH, WIDTH))
        b.gradient(f"grad scale {i}", i, (WIDTH,))
        b.slot(f"out {i}", "activation", i)
        b.slot(f"cot {i}", "activation", i)
        b.slot(f"square {i}", "activation", i)
    for i in range(last + 1):
        _add_layer(b, i, last)
    for i in range(last + 1):
        _add_norm(b, i, last)
    for i in range(last + 1):
        _add_update(b, i, last)
    return b.build()


def _add_layer(b: PipelineBuilder, i: int, last: int) -> None:
    weights = (f"w{i}", "scale")
    x = f"out {i - 1}" if i else "x"

    def forward(w: Any, scale: Any, x: Any) -> Any:
        return (_layer(i, last, w, scale, x),)

    def final_forward(w: Any, scale: Any, x: Any, y: Any, total: Any) -> Any:
        prediction = _layer(i, last, w, scale, x)
        return prediction, total + _loss(prediction, y)

    def pull_back(function: Any, arguments: Any, cotangent: Any, sums: Any) -> Any:
        _, pull = jax.vjp(function, *arguments)
        dw, dscale, dx = pull(cotangent)
        return (*([dx] if i else []), sums[0] + dw, sums[1] + dscale)

    def backward(w: Any, scale: Any, x: Any, above: Any, *sums: Any) -> Any:
        layer = lambda *a: _layer(i, last, *a)  # noqa: E731
        return pull_back(layer, (w, scale, x), above, sums)

    def final_backward(w: Any, scale: Any, x: Any, y: Any, *sums: Any) -> Any:
        loss = lambda *a: _loss(_layer(i, last, *a), y)  # noqa: E731
        return pull_back(loss, (w, scale, x), jnp.ones(()), sums)

    sums = (f"grad {i}", f"grad scale {i}")
    down = ((f"cot {i}",) if i else ()) + sums
    if i == last:
        inputs = (*weights, x, "y")
        outputs = ("prediction", "total")
        b.add(i, "forward", final_forward, (*inputs, "total"), outputs, ("total",))
        b.add(i, "backward", final_backward, (*inputs, *sums), down, sums)
    else:
        b.add(i, "forward", forward, (*weights, x), (f"out {i}",))
        inputs = (*weights, x, f"cot {i + 1}", *sums)
        b.add(i, "backward", backward, inputs, down, sums)


def _scale_gradients(last: int) -> tuple[str, ...]:
    return tuple(f"grad scale {i}" for i in range(last + 1))


def _add_norm(b: PipelineBuilder, i: int, last: int) -> None:
    """The stage's part of the squared norm of all gradients."""

    def square(gradient: Any, *scales: Any) -> Any:
        return (jnp.sum(gradient**2) + (jnp.sum(sum(scales) ** 2) if scales else 0.0),)

    scales = _scale_gradients(last) if i == 0 else ()
    b.add(i, "apply", square, (f"grad {i}", *scales), (f"square {i}",))


def _add_update(b: PipelineBuilder, i: int, last: int) -> None:
    scales = _scale_gradients(last)
    squares = tuple(f"square {j}" for j in range(last + 1))

    def update(w: Any, gradient: Any, *squares: Any) -> Any:
        return (_clipped(w, gradient, jnp.sqrt(sum(squares))),)

    def update_scale(scale: Any, *rest: Any) -> Any:
        gradients, squares = rest[: last + 1], rest[last + 1 :]
        return (_clipped(scale, sum(gradients), jnp.sqrt(sum(squares))),)

    inputs = (f"w{i}", f"grad {i}", *squares)
    b.add(i, "apply", update, inputs, (f"w{i}",), (f"w{i}",))
    if i == 0:
        inputs = ("scale", *scales, *squares)
        b.add(i, "apply", update_scale, inputs, ("scale",), ("scale",))
    if i == last:
        b.add(i, "apply", lambda total: (total + 0.0,), ("total",), ("loss",))
