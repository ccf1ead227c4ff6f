"""One plan for all processes of `jax.distributed`: process 0 plans, the others take it.

Process 0 leaves each plan in JAX's key-value store, with what it is a plan of. Whoever
finds none there plans for itself; `runtime/local.py` then compares the programs.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..jax_compat import distributed_store
from ..options import Options
from .plan_cache import option_texts

SECONDS = 300.0  # for process 0 to plan
_DIGEST_BYTES = 32
_log = logging.getLogger("autopar")


@dataclass
class _Posts:
    """How many plans process 0 has posted, as it and its readers count them."""

    number: int = 0


_posts = _Posts()


@dataclass(frozen=True)
class SharedPlan:
    """The next plan that all processes make, and what it is of."""

    store: Any
    digest: bytes

    @classmethod
    def of(
        cls, fun: Callable[..., Any], leaves: Sequence[Any], options: Options
    ) -> SharedPlan | None:
        """None where each process makes its own plan."""
        store = distributed_store()
        if store is None or not _is_shared(options):
            return None
        return cls(store, _digest(fun, leaves, options))

    def post(self, text: str) -> None:
        """Leaves the plan of process 0 for the others; "" if there is none."""
        self.store.key_value_set_bytes(
            f"autopar/plan/{_posts.number}",
            self.digest + gzip.compress(text.encode(), 3),
        )
        _posts.number += 1

    def read(self) -> str | None:
        """The plan that process 0 posts next, or one of those posted since.

        None if that is a plan of something else, or does not come.
        """
        first = _posts.number
        found = _read(self.store, first, SECONDS)
        while found is not None:
            _posts.number += 1
            if found.startswith(self.digest):
                return gzip.decompress(found[_DIGEST_BYTES:]).decode()
            found = _read(self.store, _posts.number, None)
        _posts.number = first  # it may be what this process plans next
        return None


def _is_shared(options: Options) -> bool:
    """Whether all processes make this plan, for the devices that they have together."""
    cluster, mesh = options.cluster, options.mesh
    if options.plan is not None or jax.process_count() == 1:
        return False
    if cluster is not None and cluster.num_devices != jax.device_count():
        return False
    if isinstance(mesh, Mesh):
        own = {device.process_index for device in mesh.devices.flat}
        return len(own) == jax.process_count()
    return cluster is None or cluster.ray_hosts is None


def _digest(fun: Callable[..., Any], leaves: Sequence[Any], options: Options) -> bytes:
    """What a plan is of, as far as it is known without a trace."""
    kinds = [
        f"{getattr(leaf, 'dtype', type(leaf).__name__)}{getattr(leaf, 'shape', '')}"
        for leaf in leaves
    ]
    name = getattr(fun, "__name__", type(fun).__name__)
    text = repr((name, kinds, *option_texts(options)))
    return hashlib.sha256(text.encode()).digest()


def _read(store: Any, number: int, seconds: float | None) -> bytes | None:
    """A post; None if it does not come in time, or is not there yet."""
    key = f"autopar/plan/{number}"
    try:
        if seconds is None:
            return store.key_value_try_get_bytes(key)
        return store.blocking_key_value_get_bytes(key, int(seconds * 1e3))
    except jax.errors.JaxRuntimeError as error:
        if seconds is not None:
            _log.warning("no plan came from process 0: %s", error)
        return None
