"""examples/ray_job, submitted to a job server: its log, its end, its files."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.errors import PlanFileError

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples" / "ray_job"
TOKEN = "a-token-of-this-test-only-0123456789abcdef"
STEPS = 3


def environment(token: str = TOKEN) -> dict[str, str]:
    """Ours, with a token, and with autopar found as in this process."""
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {
        **own,
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }


def submit(
    server: str, folder: Path, *arguments: str, token: str = TOKEN
) -> subprocess.CompletedProcess[str]:
    """`ray job submit`, which prints the job's log and waits for its end."""
    entry = [sys.executable, "train.py", *arguments]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
    command = [*ray, "--address", server, "--working-dir", str(folder), "--", *entry]
    for _ in range(10):
        done = subprocess.run(
            command,
            env=environment(token),
            capture_output=True,
            text=True,
            timeout=200,
        )
        if "No available agent" not in done.stdout + done.stderr:
            return done
    raise TimeoutError("The cluster's hosts must take jobs soon after they are there.")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_job_train", JOB / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The job server of two hosts of four devices that asks for a token."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("job_cluster.py"))],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        yield next(line.strip() for line in lines if line.startswith("http"))
    finally:
        process.stdin.close()
        process.wait(60)


@pytest.mark.slow
def test_a_job_trains_as_one_device_would_and_shows_its_log(
    server: str, tmp_path: Path
) -> None:
    """With a plan that was made here and sent along."""
    train = load()
    function, arguments = train.for_autopar()
    step: Any = parallelize(function, mesh="data:8")
    plan = step.plan(*arguments)
    (tmp_path / "train.py").write_text((JOB / "train.py").read_text())
    plan.save(tmp_path / "plan.json")
    digest = hashlib.sha256((tmp_path / "plan.json").read_bytes()).hexdigest()

    asked = ("--steps", str(STEPS), "--plan", "plan.json", "--plan-sha256", digest)
    done = submit(server, tmp_path, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training on 2 x 4" in done.stdout
    losses = re.findall(rf"step \d/{STEPS} loss ([\d.]+) after [\d.]+ s", done.stdout)

    state, expected = train.init(jax.random.key(0)), []
    for number in range(STEPS):
        state, loss = jax.jit(function)(state, train.make_batch(number))
        expected.append(float(loss))
    np.testing.assert_allclose(np.array(losses, float), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_job_whose_plan_was_altered_fails_and_says_why(
    server: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text((JOB / "train.py").read_text())
    (tmp_path / "plan.json").write_text("{}")
    done = submit(server, tmp_path, "--plan", "plan.json", "--plan-sha256", "0" * 64)
    assert done.returncode == 1
    assert "the plan plan.json has the SHA-256" in done.stdout + done.stderr


@pytest.mark.slow
def test_nobody_submits_without_the_token(server: str) -> None:
    done = submit(server, JOB, token="another-token-0123456789abcdef0123456")
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()
    assert "submitted successfully" not in done.stdout + done.stderr


def test_a_plan_is_read_only_if_its_digest_and_its_version_are_right(
    tmp_path: Path,
) -> None:
    train, path = load(), tmp_path / "plan.json"
    function, arguments = train.for_autopar()
    step: Any = parallelize(function, mesh="data:8")
    step.plan(*arguments).save(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert train.read_plan(path, digest).sharding.function == "train_step"

    content = json.loads(path.read_text()) | {"version": 99}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has the SHA-256"):
        train.read_plan(path, digest)
    with pytest.raises(PlanFileError, match="version"):
        train.read_plan(path, hashlib.sha256(path.read_bytes()).hexdigest())
