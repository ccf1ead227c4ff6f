"""CLI-2, CLI-3 and CLI-5: two processes of `jax.distributed`, four devices each."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from tests.rows.test_checkpoints import (
    ABSTRACT,
    BATCH,
    KEY,
    WIDTH,
    abstract_state,
    batches_of,
    data,
    init,
    parallel,
    train,
    train_step,
)
from tests.safetensors_file import read_safetensors

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("client_script.py")

pytestmark = pytest.mark.slow  # three processes that import JAX


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[float], Any]:
    """Losses of four steps on one device, and the state after three."""
    batches = autopar.Batches(data(), ABSTRACT, seed=5)
    state, losses = train(jax.jit(train_step), jax.jit(init)(KEY), batches, 3)
    after_three = jax.device_get(state)
    return losses + train(jax.jit(train_step), state, batches, 1)[1], after_three


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one process: that of step 2 damaged where process 1 looks."""
    folder = tmp_path_factory.mktemp("clients")
    step = parallel("4 x 2")
    batches = batches_of(step)
    state = step.init(init, KEY, batch=ABSTRACT)
    with autopar.Checkpoints(folder / "from") as checkpoints:
        for number in (1, 2):
            state, _ = train(step, state, batches, 1)
            checkpoints.save(number, state, data_position=batches.position)
    manifest = folder / "from" / "2" / "autopar_manifest.json"
    path = manifest.parent / sorted(json.loads(manifest.read_text())["files"])[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def clients(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes printed, which went on from there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT)),
                *(str(folder / name) for name in ("from", "to")),
                *map(str, (rank, 2, port)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_cli_2_a_differing_mesh_is_an_error_in_all(clients: Any) -> None:
    for found in clients:
        message = found["differs"]
        assert message.startswith("RuntimeError: All processes of a mesh must run one")
        assert "process 0 has differing on mesh data:8" in message
        assert "process 1 has differing on mesh data:4;model:2" in message


def test_cli_2_a_process_that_does_not_come_is_named(clients: Any) -> None:
    message = clients[0]["alone"]
    assert message.startswith("TimeoutError: All processes of a mesh must run alone")
    assert "process 1 did not come to it in 2 s" in message


def test_cli_3_each_process_reads_its_part_of_the_batch(
    clients: Any, uninterrupted: Any
) -> None:
    first, second = (found["read"] for found in clients)
    assert len(first) == len(second) == 2 * BATCH // 2
    assert not set(first) & set(second)
    for found in clients:
        np.testing.assert_allclose(found["losses"], uninterrupted[0][1:3], rtol=1e-5)


def test_cli_3_what_lies_elsewhere_is_not_read(clients: Any) -> None:
    for found in clients:
        for message in found["read there"]:
            assert "non-addressable" in message


def test_cli_5_processes_agree_on_what_is_damaged(clients: Any) -> None:
    assert [found["step"] for found in clients] == [1, 1]
    assert "step 1 was restored" in clients[0]["said"][0]
    assert "another process" in clients[0]["said"][0]
    assert "was altered after it was written" in clients[1]["said"][0]


def test_cli_5_each_process_writes_its_shards(clients: Any, folder: Path) -> None:
    assert clients[0]["left"] == clients[1]["left"] == ["3", "weights.safetensors"]
    sizes = [
        sum(p.stat().st_size for p in part.rglob("*") if p.is_file())
        for part in sorted((folder / "to" / "3").glob("ocdbt.process_*"))
    ]
    one_copy = 3 * 4 * 4 * WIDTH**2
    assert len(sizes) == 2
    assert all(0.4 * one_copy < size < 0.53 * one_copy for size in sizes)


def test_cli_5_another_number_of_processes_goes_on(
    clients: Any, folder: Path, uninterrupted: Any
) -> None:
    step = parallel("4 x 2")
    with autopar.Checkpoints(folder / "to") as checkpoints:
        found = checkpoints.restore(abstract_state(step))
    batches = batches_of(step, found.data_position)
    assert found.step == 3
    _, losses = train(step, found.state, batches, 1)
    np.testing.assert_allclose(losses, uninterrupted[0][3:], rtol=1e-5)


def test_cli_5_one_process_exports_what_all_hold(
    clients: Any, folder: Path, uninterrupted: Any
) -> None:
    weights = read_safetensors(folder / "to" / "weights.safetensors")
    step = parallel("one device")
    with autopar.Checkpoints(folder / "to") as checkpoints:
        state = checkpoints.restore(abstract_state(step)).state
    for number, kernel in enumerate(state[0]):
        assert weights[str(number)].tobytes() == np.asarray(kernel).tobytes()
        np.testing.assert_allclose(
            kernel, uninterrupted[1][0][number], rtol=1e-4, atol=1e-6
        )
