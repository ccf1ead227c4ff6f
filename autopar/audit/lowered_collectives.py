"""Reads the collectives out of a lowered program, StableHLO for any platform.

The module is walked from `main`, through calls, loops and branches; every collective
found is reported with the product of the trip counts around it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from autopar.audit.trip_counts import Operation, Scope, TripCounter, body_of, callee_of
from autopar.sharding.collective import (
    KINDS,
    Collective,
    Surroundings,
    array_bytes,
    device_groups,
)

_COLLECTIVES = {f"stablehlo.{kind}": kind for kind in KINDS}
_REDUCTIONS = {
    "stablehlo.add": "sum",
    "stablehlo.multiply": "product",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "and",
    "stablehlo.or": "or",
}
_BRANCHES = ("stablehlo.case", "stablehlo.if")


def collectives_in_lowered(lowered: jax.stages.Lowered) -> tuple[Collective, ...]:
    """Returns the collectives of a lowered program, in program order.

    Branches of a conditional are all counted, each marked `conditional`; loops whose
    trip count is not a constant are counted once and marked `unbounded`. An operation
    with several operands is reported as one collective per operand.

    Args:
      lowered: what `jax.jit(f).lower(...)` returned, for any platform.

    Raises:
      ValueError: if a collective spells its groups in a way this reader does not know.
    """
    module = lowered.compiler_ir(dialect="stablehlo")
    return tuple(_Reader.of(module).read())


@dataclass(frozen=True)
class _Reader:
    """One module, its functions by name, and those that reach no collective."""

    functions: dict[str, Operation]
    meshes: dict[str, dict[str, int]]  # axis sizes by name, by the mesh's symbol
    silent: frozenset[str]
    num_replicas: int
    num_partitions: int

    @classmethod
    def of(cls, module: Any) -> "_Reader":
        functions = {
            op.attributes["sym_name"].value: op
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        meshes = dict(
            _mesh(str(op))
            for op in module.body.operations
            if op.operation.name == "sdy.mesh"
        )
        attributes = module.operation.attributes
        sizes = [
            attributes[name].value if name in attributes else 1
            for name in ("mhlo.num_replicas", "mhlo.num_partitions")
        ]
        return cls(functions, meshes, _silent_functions(functions), *sizes)

    def read(self) -> Iterator[Collective]:
        main = self.functions["main"]
        yield from self._walk(body_of(main), None, Surroundings())

    def _walk(
        self, block: Any, scope: Scope | None, around: Surroundings
    ) -> Iterator[Collective]:
        for op in block.operations:
            operation = op.operation
            name = operation.name
            if name in _COLLECTIVES:
                yield from self._collectives(operation, around)
            elif name == "stablehlo.while":
                yield from self._walk_loop(operation, scope, around)
            elif callee := callee_of(operation):
                if callee not in self.silent:
                    inner = Scope(tuple(operation.operands), scope)
                    yield from self._walk(
                        body_of(self.functions[callee]), inner, around
                    )
            else:
                is_branch = name in _BRANCHES
                inside = around.in_branch() if is_branch else around
                for region in operation.regions:
                    for inner_block in region.blocks:
                        yield from self._walk(inner_block, scope, inside)

    def _walk_loop(
        self, loop: Operation, scope: Scope | None, around: Surroundings
    ) -> Iterator[Collective]:
        condition, body = (region.blocks[0] for region in loop.regions)
        trips = TripCounter(self.functions).trip_count(loop, scope)
        # The condition is tested once more than the body runs.
        tests = around.in_loop(None if trips is None else trips + 1)
        yield from self._walk(condition, scope, tests)
        if trips != 0:
            yield from self._walk(body, scope, around.in_loop(trips))

    def _collectives(self, op: Operation, around: Surroundings) -> Iterator[Collective]:
        kind = _COLLECTIVES[op.name]
        attributes = op.attributes
        is_permute = kind == "collective_permute"
        written = attributes["source_target_pairs" if is_permute else "replica_groups"]
        groups = device_groups(
            _groups(written, self.meshes),
            kind=kind,
            has_channel="channel_handle" in attributes,
            has_global_ids="use_global_device_ids" in attributes,
            num_replicas=self.num_replicas,
            num_partitions=self.num_partitions,
        )
        for result in op.results:
            dtype, num_bytes = _array(str(result.type))
            yield Collective(
                kind,
                groups,
                dtype,
                num_bytes,
                around.count,
                _reduction(op),
                _source(str(op.location)),
                around.conditional,
                around.unbounded,
            )


def _silent_functions(functions: dict[str, Operation]) -> frozenset[str]:
    """Names the functions from which no collective is reached."""
    callees: dict[str, set[str]] = {}
    loud = set()
    for name, function in functions.items():
        callees[name] = set()
        for op in _all_operations(function.operation):
            if op.name in _COLLECTIVES:
                loud.add(name)
            elif callee := callee_of(op):
                callees[name].add(callee)
    while callers := {n for n in callees if n not in loud and callees[n] & loud}:
        loud |= callers
    return frozenset(functions) - loud


def _all_operations(op: Operation) -> Iterator[Operation]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _all_operations(inner.operation)


def _mesh(text: str) -> tuple[str, dict[str, int]]:
    """Symbol and axes of `sdy.mesh @mesh = <["a"=2, "b"=4]>`."""
    symbol = re.search(r"sdy\.mesh @([\w.]+)", text)
    assert symbol is not None, text
    axes = text.partition("<[")[2].partition("]")[0]
    return symbol.group(1), {
        name: int(size) for name, size in re.findall(r'"([^"]+)"\s*=\s*(\d+)', axes)
    }


def _groups(attribute: Any, meshes: dict[str, dict[str, int]]) -> list[list[int]]:
    """A table of device ids, or, from jax 0.11 on, axes of a mesh in the module."""
    text = str(attribute)
    if "replica_group_mesh_axes" in text:
        symbol = re.search(r"mesh = @([\w.]+)", text)
        assert symbol is not None, text
        sizes = meshes[symbol.group(1)]
        names = list(sizes)
        axes = [names.index(name) for name in re.findall(r'name = "([^"]+)"', text)]
        ids = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
        rest = [axis for axis in range(len(names)) if axis not in axes]
        group_size = prod(ids.shape[axis] for axis in axes)
        return ids.transpose(*rest, *axes).reshape(-1, group_size).tolist()
    table = np.array(attribute)
    if table.ndim != 2 or table.dtype.kind != "i":
        raise ValueError(
            "The groups of a collective must be a dense table of device ids, but got "
            f"{attribute}; read the compiled program with `collectives_in_compiled`."
        )
    # Groups of unequal size are filled up with -1.
    return [[number for number in group if number >= 0] for group in table.tolist()]


def _reduction(op: Operation) -> str:
    bodies = (inner for region in op.regions for inner in region.blocks[0].operations)
    names = (inner.operation.name for inner in bodies)
    return next((_REDUCTIONS[name] for name in names if name in _REDUCTIONS), "")


def _array(tensor_type: str) -> tuple[str, int]:
    """Element type and bytes of a type such as `tensor<8x4xf32>`."""
    found = re.fullmatch(r"tensor<((?:\d+x)*)(complex<)?(\w+)>?.*>", tensor_type)
    assert found, f"Cannot read the tensor type {tensor_type}."
    dims = [int(dim) for dim in found.group(1).split("x") if dim]
    return array_bytes(found.group(3), dims, is_complex=bool(found.group(2)))


def _source(location: str) -> str:
    """Operator and innermost source line of an MLIR location."""
    name = re.match(r'loc\("([^"]*)"\(', location)
    line = re.search(r'"([^"]*)":(\d+)', location)
    parts = [name.group(1)] if name else []
    parts += [f"{line.group(1).rpartition('/')[2]}:{line.group(2)}"] if line else []
    return " ".join(parts)
