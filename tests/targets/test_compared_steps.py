"""Steps sharded by hand beside their plans, compiled for devices that are not here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import autopar
from tests.test_comparison import arguments, by_hand, train_step

pytestmark = pytest.mark.targets


def abstract() -> Any:
    params = {
        "up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    }
    return params, jax.ShapeDtypeStruct((4096, 1024), jnp.float32)


@pytest.mark.parametrize("has_devices", [True, False])
def test_both_are_compiled_for_the_cluster_of_the_plan(has_devices: bool) -> None:
    mesh: Any = AbstractMesh((2, 4), ("data", "model"))
    if has_devices:
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), mesh.axis_names)
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.preset("8xH100"))
    found = autopar.compare(step, by_hand(mesh), *abstract())
    assert found.devices == "1x8xH100"
    ours, theirs = found.planned, found.other
    assert ours.replayed and theirs.replayed
    assert 0 < theirs.replayed.exposed_seconds < theirs.replayed.seconds < 1e-2
    # By hand a gradient of each matrix's part is reduced over `data`, and activations
    # over `model`.
    part = (1024 * 4096 // 4) * 4
    activations = (4096 // 2) * 1024 * 4
    reduced = theirs.bytes_by_kind["all_reduce"]
    assert reduced == pytest.approx(2 * part + activations, rel=0.01)
    # Donated: parameters once, the batch and less than three arrays of activations.
    hidden = (4096 // 2) * 4096 // 4 * 4
    assert 2 * part + activations <= theirs.device_bytes
    assert theirs.device_bytes < 2 * part + activations + 3 * hidden + (64 << 20)
    assert "exposed communication" in str(found)


def test_another_number_of_devices_is_refused() -> None:
    mesh = AbstractMesh((2, 2), ("data", "model"))
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.preset("8xH100"))
    with pytest.raises(ValueError, match=r"all 8 devices of 1x8xH100, but .* for 4"):
        autopar.compare(step, by_hand(mesh), *arguments())
