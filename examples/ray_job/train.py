"""Trains a small network on the hosts of a Ray cluster; what `ray job submit` runs.

ray job submit --working-dir examples/ray_job -- python train.py --steps 20
"""

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

BATCH, WIDTH, HIDDEN = 64, 32, 128
optimizer = optax.adam(1e-3)


def init(key: jax.Array) -> Any:
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / 6,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / 11,
    }
    return params, optimizer.init(params)


def train_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    params, opt_state = state

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


def make_batch(number: int) -> dict[str, np.ndarray]:
    """The examples of a step: the same ones whenever it is run again."""
    random = np.random.default_rng(number)
    x = random.standard_normal((BATCH, WIDTH), np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def for_autopar() -> tuple[Any, tuple[Any, Any]]:
    """The step and what it takes, for `autopar plan train:for_autopar`."""
    return train_step, (jax.eval_shape(init, jax.random.key(0)), make_batch(0))


def read_plan(path: Path, digest: str) -> autopar.Plan:
    """The plan in a file, if its SHA-256 is the one that was agreed on.

    A plan file is data: reading it runs nothing, and refuses other versions.
    """
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != digest:
        raise ValueError(f"the plan {path} has the SHA-256 {found}, not {digest}.")
    return autopar.Plan.load(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", type=Path, help="a plan file that was sent along")
    parser.add_argument("--plan-sha256", help="what it must hash to")
    arguments = parser.parse_args()
    plan = None
    if arguments.plan:
        if not arguments.plan_sha256:
            parser.error("--plan needs --plan-sha256; `sha256sum plan.json` prints it.")
        plan = read_plan(arguments.plan, arguments.plan_sha256)

    cluster = autopar.Cluster.ray()
    print(f"training on {cluster.num_hosts} x {cluster.devices_per_host}", flush=True)
    step = autopar.parallelize(train_step, cluster=cluster, plan=plan)
    state = init(jax.random.key(0))
    start = time.monotonic()
    for number in range(arguments.steps):
        state, loss = step(state, make_batch(number))
        seconds = time.monotonic() - start
        loss = float(autopar.fetch(loss))
        place = f"{number + 1}/{arguments.steps}"
        print(f"step {place} loss {loss:.6f} after {seconds:.1f} s", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
