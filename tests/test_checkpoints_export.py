"""Exported weights: one file, byte for byte, never more than one leaf in memory."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.runtime import checkpoints_export
from autopar.state.distributed_array import DistributedArray
from tests.safetensors_file import read_safetensors

DTYPES = "bfloat16 float16 float32 float8_e4m3fn float8_e5m2 int8 uint16 bool complex64"


def in_shards(array: Any, *spec: Any) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def test_the_file_is_the_gathered_arrays(tmp_path: Path) -> None:
    random = np.random.default_rng(0).standard_normal
    pieces = [jax.device_put(random((n, 3), "f4"), jax.devices()[n]) for n in (1, 2)]
    weights = {
        "layers": [in_shards(random((8, 6), "f4"), "b"), in_shards(random(8), "a")],
        "whole": in_shards(random((4, 4), "f4")),
        "corner": in_shards(random((8, 4), "f4"), "a", "b").T,
        "pieces": DistributedArray(pieces),
        "numpy": random((3, 4)).T,
        "scalar": jnp.float32(3),
        "number": 2.5,
        "empty": jnp.zeros((0, 4)),
        "nan": jnp.array([np.nan, -0.0, np.inf]),
        "dtypes": {t: jnp.arange(5).astype(t) for t in DTYPES.split()},
        "activation": jnp.tanh,
    }
    autopar.export_weights(tmp_path / "model.safetensors", weights)
    found = read_safetensors(tmp_path / "model.safetensors")
    assert found.pop("layers.0").tobytes() == np.asarray(weights["layers"][0]).tobytes()
    assert found.pop("layers.1").tobytes() == np.asarray(weights["layers"][1]).tobytes()
    for name, array in weights.pop("dtypes").items():
        ours = found.pop(f"dtypes.{name}")
        assert ours.dtype == array.dtype
        assert ours.tobytes() == np.asarray(array).tobytes()
    for name in ("activation", "empty", "layers"):
        weights.pop(name)
    assert found.keys() == weights.keys()
    for name, ours in found.items():
        expected = np.asarray(weights[name])
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
        assert ours.tobytes() == expected.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_library_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    weights = {"b": jnp.arange(3.0), "a": {"c": in_shards(jnp.ones((8, 2), "i2"), "a")}}
    autopar.export_weights(tmp_path / "model.safetensors", weights)
    found = library.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(found["b"], np.arange(3.0, dtype="f4"))
    np.testing.assert_array_equal(found["a.c"], np.ones((8, 2), "i2"))


def test_arrays_are_aligned_and_leave_no_holes(tmp_path: Path) -> None:
    weights = {"a": jnp.ones(3, bool), "b": jnp.ones(5, "bfloat16"), "c": jnp.ones(7)}
    path = tmp_path / "model.safetensors"
    autopar.export_weights(path, weights)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    assert [header[name]["data_offsets"] for name in "cba"] == [
        [0, 28],
        [28, 38],
        [38, 41],
    ]
    assert len(content) == 8 + size + 41


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_one_leaf_at_a_time_is_in_memory(tmp_path: Path) -> None:
    num_leaves, leaf_bytes = 64, 4 << 20  # far more than a worker's other threads take
    rows = np.zeros((leaf_bytes // 4096, 1024), "f4")

    def weights() -> list[jax.Array]:
        return [in_shards(rows + i, "a", "b") for i in range(num_leaves)]

    autopar.export_weights(tmp_path / "first", weights()[:32])  # what allocators keep
    fresh = jax.block_until_ready(weights())
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = memory("VmRSS")
    autopar.export_weights(tmp_path / "all", fresh)
    assert (tmp_path / "all").stat().st_size > num_leaves * leaf_bytes
    assert memory("VmHWM") - before < num_leaves * leaf_bytes / 2


def memory(name: str) -> int:
    """Bytes of this process, now or at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", status)[0])


class TestRefused:
    @pytest.mark.parametrize(
        ("weights", "error", "message"),
        [
            ({"w": jnp.ones(3, "int4")}, TypeError, "w is int4; export the weights"),
            ({"k": jax.random.key(0)}, TypeError, r"k is key<fry>; export the weights"),
            ({"w": jax.ShapeDtypeStruct((3,), "f4")}, TypeError, "holds values"),
            ({}, ValueError, "arrays and numbers"),
        ],
    )
    def test_other_weights(
        self, weights: Any, error: Any, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(error, match=message):
            autopar.export_weights(tmp_path / "model", weights)
        assert not list(tmp_path.iterdir())

    def test_a_full_disk_leaves_the_file_that_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        autopar.export_weights(tmp_path / "model", {"w": jnp.zeros(3)})

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoints_export.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            autopar.export_weights(tmp_path / "model", {"w": jnp.ones(3)})
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        np.testing.assert_array_equal(read_safetensors(tmp_path / "model")["w"], 0)
