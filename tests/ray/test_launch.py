"""`autopar launch` runs a script with a cluster of its own, and ends it after."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.cli import main

SCRIPT = """
import os, sys
import jax, numpy as np
import autopar

cluster = autopar.Cluster.ray()
print("arguments", sys.argv[1:], cluster.num_hosts, cluster.devices_per_host)
step = autopar.parallelize(lambda x: x.sum(), cluster=cluster)
print("sum", float(step(np.arange(8, dtype=np.float32))), flush=True)
sys.exit(7)
"""


def environment() -> dict[str, str]:
    """Ours, but that no other cluster of this machine is found."""
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**own, "PYTHONPATH": os.pathsep.join(sys.path)}


def launch(
    *arguments: str, folder: Path, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autopar.cli", "launch", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def processes_of(parent: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in map(int, children):
        found |= {child} | processes_of(child)
    return found


def test_a_script_gets_a_cluster_its_arguments_and_its_exit_code(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--hosts", "1", "--devices-per-host", "2")
    done = launch(*options, "train.py", "--debug", "--steps", "3", folder=tmp_path)
    assert done.returncode == 7, done.stderr
    assert "arguments ['--debug', '--steps', '3'] 1 2" in done.stdout
    assert "sum 28.0" in done.stdout


@pytest.mark.slow
def test_a_terminated_launch_leaves_no_process(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import time, autopar\n"
        "autopar.Cluster.ray()\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "autopar.cli", "launch", "--hosts", "1", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    below = processes_of(process.pid)
    assert len(below) > 3, "the script, and those of the cluster"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    end = time.monotonic() + 20
    while any(Path(f"/proc/{each}").exists() for each in below):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.2)


STAGES_OF_TWO_HOSTS = """
import jax, numpy as np
import autopar
from benchmarks.models import build

workload = build("mlp", optimizer="adamw_clip")
method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
step = autopar.parallelize(workload.step, cluster=autopar.Cluster.ray(), method=method)
state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
got = expected = state, None
for _ in range(2):
    got, expected = step(got[0], batch), jax.jit(workload.step)(expected[0], batch)
leaves = map(jax.tree.leaves, (autopar.fetch(got), expected))
for a, b in zip(*leaves, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
(executable,) = [each.execute for each in step._running()]
print("hosts of a stage", executable.workers.num_hosts)
"""


@pytest.mark.slow
def test_a_stage_may_span_hosts(tmp_path: Path):
    (tmp_path / "train.py").write_text(STAGES_OF_TWO_HOSTS)
    done = launch(
        *("--hosts", "4", "--devices-per-host", "2", "train.py"),
        folder=tmp_path,
        seconds=200,
    )
    assert done.returncode == 0, done.stderr
    assert "hosts of a stage (2, 2)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nosuch.py",), "must be a Python file, but 'nosuch.py' is none"),
        (("--hosts", "0", "train.py"), "needs 1 or more hosts, but got 0"),
        (("--devices-per-host", "-1", "train.py"), "1 or more devices per host"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    text: str,
):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["launch", *arguments])
    assert caught.value.code == 1 and text in capsys.readouterr().err


def test_help_shows_how(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--help"])
    printed = capsys.readouterr().out
    assert not caught.value.code
    assert "--hosts" in printed and "--devices-per-host" in printed
