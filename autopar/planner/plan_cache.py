"""Plans kept between processes, by the content of all that they depend on.

A plan is found again if the graph (operators, params, source lines), where arguments
lie, the options, the cluster, autopar's own code and jax are the same. Files are plans
as `Plan.save` writes them, compressed; nothing in them is run.

`AUTOPAR_CACHE_DIR` moves the cache, and `off` switches it off.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..cache_folder import cache_folder, store_file
from ..clusters.cluster_file import to_toml
from ..errors import PlanFileError
from ..graph.op_graph import Constant, OpGraph
from ..plans.plan import ShardingPlan
from ..plans.plan_check import check_against
from ..plans.plan_file import from_json, to_json
from ..rules.base import factors_of, rule_of
from .gather_again import graph_of_plan
from .plan_request import PlanRequest

MOST_PLANS = 256
_NOT_OF_THE_PLAN = ("cluster", "plan", "like", "donate_argnums", "names")
_log = logging.getLogger("autopar")


@dataclass(frozen=True)
class CacheEntry:
    """Where one plan is kept; nowhere, if the cache is off."""

    path: Path | None

    def load(self, graph: OpGraph) -> ShardingPlan | None:
        """The plan, or None: a file that is no plan of this graph is dropped."""
        if self.path is None or not self.path.exists():
            return None
        try:
            text = gzip.decompress(self.path.read_bytes()).decode()
            plan = from_json(text, str(self.path))
            check_against(plan, graph_of_plan(graph, plan))
        except (OSError, EOFError, ValueError, PlanFileError) as error:
            _log.warning(
                "a cached plan cannot be read and is made anew: %s: %s",
                *(self.path, error),
            )
            return None
        return plan

    def store(self, plan: ShardingPlan) -> None:
        """Keeps the plan; a folder that cannot be written is told once."""
        if self.path is not None:
            store_file(self.path, to_json(plan), MOST_PLANS)


def cache_entry(request: PlanRequest) -> CacheEntry:
    """Where the plan of a request is kept."""
    folder = cache_folder()
    if folder is None:
        return CacheEntry(None)
    digest = digest_of(_content(request))
    return CacheEntry(folder / "plans" / f"{digest.hexdigest()[:40]}.json.gz")


def _content(request: PlanRequest) -> Iterator[str]:
    yield f"jax {jax.__version__} autopar {_code()}"
    yield f"{request.cluster.name}\n{to_toml(request.cluster)}"
    for each in fields(request.options):
        if each.name not in _NOT_OF_THE_PLAN:
            value = getattr(request.options, each.name)
            yield plain_text(f"{each.name} {value!r}")
    yield f"batch {list(request.batch)}"
    for leaf in request.leaves:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            yield f"{tuple(sharding.mesh.shape.items())} {sharding.spec}"
        else:
            yield "-"
    yield from graph_lines(request.graph)


@cache
def _code() -> str:
    """Changes whenever a file of autopar or its solver does."""
    here = Path(__file__).parents[1]
    folders = [here, here.parent / "solver"]
    digest = hashlib.sha256()
    for path in sorted(p for folder in folders for p in folder.rglob("*.py")):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


_ADDRESS = re.compile(r"0x[0-9a-f]+")


def graph_lines(graph: OpGraph) -> Iterator[str]:
    """Lines that are equal for equal graphs, source lines included."""
    yield f"{graph.name} {graph.inputs} {graph.output_paths}"
    yield from (f"{tensor} {tensor.block}" for tensor in graph.tensors)
    for block in graph.blocks:
        outputs = [_operand(operand) for operand in block.outputs]
        trips = block.trip_count, block.weight, block.conditional, block.unbounded
        yield f"block {block.parent} {trips} {block.inputs} {outputs}"
        for op in block.operators:
            operands = [_operand(operand) for operand in op.operands]
            yield f"{op.name} {op.kind} {op.source} {operands} {op.results} {op.bodies}"
            yield plain_text(sorted((k, str(v)) for k, v in op.params.items()))
            rule = rule_of(op)
            if rule is not None and _is_registered_by_user(rule.factors):
                yield f"{factors_of(op)}"


def digest_of(lines: Iterable[str]) -> Any:
    """SHA-256 of lines, to which more may be added."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest


def plain_text(value: Any) -> str:
    """As it prints, without the addresses of objects."""
    return _ADDRESS.sub("", str(value))


def _is_registered_by_user(factors: Any) -> bool:
    module = str(getattr(factors, "__module__", ""))
    return module == "autopar.rules.custom" or not module.startswith("autopar.")


def _operand(operand: int | Constant) -> str:
    if not isinstance(operand, Constant):
        return f"%{operand}"
    value = operand.value
    whole = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return f"{operand.type} {whole!r}"
