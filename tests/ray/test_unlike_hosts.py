"""Hosts that lack autopar, or have other versions, are named with what to do."""

from collections.abc import Callable

import numpy as np
import pytest

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster
from autopar.errors import WorkerError

WITHOUT_AUTOPAR = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "autopar":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
"""
WITH_ANOTHER_JAX = """
from importlib import metadata

version = metadata.version
metadata.version = lambda name: "0.1.2" if name == "jax" else version(name)
"""


@pytest.mark.slow  # workers start, each time
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (WITHOUT_AUTOPAR, r"host \d has not; pip install 'autopar\[ray\]' there"),
        (WITH_ANOTHER_JAX, r"host 0 at .* has jax 0\.1\.2 with jaxlib .*the driver"),
    ],
    ids=["no autopar", "another jax"],
)
def test_they_are_refused(
    text: str, told: str, hosts_run: Callable[[str], None], ray_cluster: Cluster
):
    hosts_run(text)
    step = parallelize(lambda x: x.sum(), cluster=ray_cluster)
    with pytest.raises(WorkerError, match=told):
        step(np.ones(8, np.float32))
