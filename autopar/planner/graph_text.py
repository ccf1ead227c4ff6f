"""A graph as text, to tell whether two are equal."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..graph.op_graph import Constant, OpGraph
from ..rules.base import factors_of, rule_of

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
