"""One plan for all processes of `jax.distributed`: process 0 plans, the others take it.

Process 0 leaves each plan in JAX's key-value store, with what it is a plan of. Whoever
finds none there plans for itself; `runtime/local.py` then compares the programs.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from ..errors import PlanFileError
from ..jax_compat import distributed_store
from ..options import Options
from ..plans.parallel_plan import Plan
from ..plans.plan_file import from_json, to_json
from .plan_cache import option_texts
from .planning import Planned, Refused, no_more, plan_function

SECONDS = 300.0  # for process 0 to plan
_DIGEST_BYTES = 32
_log = logging.getLogger("autopar")


@dataclass
class _Posts:
    """How many plans process 0 has posted, as it and its readers count them."""

    number: int = 0


_posts = _Posts()


def plan_together(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    refused: Refused = no_more,
) -> Planned:
    """As `plan_function`, but one plan for all processes that call it.

    Raises:
      InfeasiblePlanError, ValueError: those of `plan_function`.
    """
    store = distributed_store()
    if store is None or not _is_shared(options):
        return plan_function(fun, args, kwargs, options, refused)
    digest = _digest(fun, args, kwargs, options)
    planned, text = None, None
    if jax.process_index() == 0:
        try:
            planned = plan_function(fun, args, kwargs, options)
            text = to_json(planned.plan.sharding)
        finally:
            _post(store, digest, text or "")
    else:
        text = _posted(store, digest)
    if text:
        try:  # process 0 as well, so that all come to their programs in one way
            plan = Plan(from_json(text, "the plan of process 0"))
            return plan_function(fun, args, kwargs, replace(options, plan=plan))
        except (PlanFileError, ValueError, NotImplementedError) as error:
            _log.warning("the plan of process 0 is none of this step: %s", error)
    return planned or plan_function(fun, args, kwargs, options)


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


def _digest(fun: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> bytes:
    """What a plan is of, as far as it is known without a trace."""
    kinds = [
        f"{getattr(leaf, 'dtype', type(leaf).__name__)}{getattr(leaf, 'shape', '')}"
        for leaf in jax.tree.leaves((args, kwargs))
    ]
    name = getattr(fun, "__name__", type(fun).__name__)
    text = repr((name, kinds, *option_texts(options)))
    return hashlib.sha256(text.encode()).digest()


def _post(store: Any, digest: bytes, text: str) -> None:
    store.key_value_set_bytes(
        f"autopar/plan/{_posts.number}", digest + gzip.compress(text.encode(), 3)
    )
    _posts.number += 1


def _posted(store: Any, digest: bytes) -> str | None:
    """The plan that process 0 posts next, or one of those that it has posted since.

    None if that is a plan of something else, or does not come.
    """
    first = _posts.number
    found = _read(store, first, SECONDS)
    while found is not None:
        _posts.number += 1
        if found.startswith(digest):
            return gzip.decompress(found[_DIGEST_BYTES:]).decode()
        found = _read(store, _posts.number, None)
    _posts.number = first  # it may be what this process plans next
    return None


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
