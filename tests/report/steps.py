"""A small step to report on, and how its pages are read."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from autopar.steps.parallel_plan import Plan
from tests.report.html_pages import Page

NEEDED = "reports need jinja2 and plotly: pip install autopar[report]"
SECTIONS = (
    "headline",
    "cautions",
    "devices",
    "arguments",
    "compute",
    "collectives",
    "memory",
    "why",
    "alternatives",
    "audit",
)


def step(state: Any, x: jax.Array) -> Any:
    """Four tanh layers of 64, trained by momentum."""

    def loss(params: Any) -> jax.Array:
        y = x
        for kernel in params:
            y = jnp.tanh(y @ kernel)
        return jnp.mean(jnp.square(y))

    value, grads = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, value


def arguments() -> tuple[Any, jax.ShapeDtypeStruct]:
    kernels = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    state = {"params": kernels, "moments": list(kernels)}
    return state, jax.ShapeDtypeStruct((64, 64), jnp.float32)


def written(plan: Plan, folder: Path, **options: Any) -> Page:
    path = folder / "plan.html"
    plan.report(path, **options)
    return Page(path.read_text(encoding="utf-8"))


def paths_in(page: Page) -> set[str]:
    return set(page.texts["code"])
