"""Build the operator graph of a traced function: inline calls, name every tensor.

Calls (jit, custom derivatives, remat) are inlined by mapping their variables; remat
keeps its recomputation by a barrier on its inputs. Generators (iota, broadcasts of
literals) are made anew for each reader, so that every reader has them in its own spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..jax_compat import (
    CALLS,
    DropVar,
    Literal,
    callee,
    literal_value,
    name_scope,
    source_line,
    with_scan_counts,
)
from .effects import refuse_effects
from .garbage import without_garbage_collection
from .op_graph import (
    Block,
    Constant,
    GraphInput,
    Operand,
    Operator,
    OpGraph,
    Tensor,
    TensorType,
)
from .traced_function import Roles, TracedFunction

_REMATS = ("remat2", "checkpoint")
BARRIER = "optimization_barrier"
SCAN = "scan"
WHILE = "while"
COND = "cond"
SHARD_MAP = "shard_map"
PINS = ("autopar_pin", "sharding_constraint", "reshard")
RELAYOUT_LIKE = "autopar_relayout_like"
# Planned by ports, not by a rule.
STRUCTURED = (BARRIER, SCAN, WHILE, COND, SHARD_MAP, *PINS)
ASSUMED_TRIPS = 10.0  # executions that a loop of unknown length is priced with


def tensor_type(aval: Any) -> TensorType:
    """The graph's type of a JAX abstract value, which must be an array's."""
    if not hasattr(aval, "shape"):
        raise NotImplementedError(
            f"Every value of a parallel step must be an array, but one is of type "
            f"{aval}: tokens and the like order side effects, which the devices do not "
            f"share. Keep it out of the step."
        )
    return _shared_type(tuple([int(size) for size in aval.shape]), aval.dtype)


@lru_cache(maxsize=1 << 16)
def _shared_type(shape: tuple[int, ...], dtype: Any) -> TensorType:
    """One object for equal types, which are then compared quickly."""
    return TensorType(shape, dtype)


@without_garbage_collection()
def build_graph(
    traced: TracedFunction, roles: Roles, *, has_literals: bool = False
) -> OpGraph:
    """The operator graph of `traced`; closed-over arrays become its last inputs.

    With `has_literals` they are written in the graph, as those of inner calls are.
    """
    builder = _Builder()
    jaxpr = traced.jaxpr.jaxpr
    block = builder.open_block(None)
    inputs = []
    env: _Env = {}
    for index, (var, path) in enumerate(
        zip(jaxpr.invars, traced.input_paths, strict=True)
    ):
        env[var] = builder.tensor(path, tensor_type(var.aval), block)
        output = roles.next_output[index]
        inputs.append(GraphInput(env[var], path, roles.roles[index], output))
    constants = zip(jaxpr.constvars, traced.jaxpr.consts, strict=True)
    for number, (var, value) in enumerate(constants):
        if has_literals:
            env[var] = Constant(value, tensor_type(var.aval))
            continue
        path = f"constant[{number}]"
        env[var] = builder.tensor(path, tensor_type(var.aval), block)
        inputs.append(GraphInput(env[var], path, "constant"))
    block.inputs = [graph_input.tensor for graph_input in inputs]
    outputs = builder.inline(jaxpr, env, block, scope="")
    block.outputs = [builder.read(operand, block) for operand in outputs]
    graph = OpGraph(
        traced.name,
        tuple(builder.tensors),
        tuple(builder.freeze(open_block) for open_block in builder.blocks),
        tuple(inputs),
        traced.output_paths,
    )
    graph.verify()
    return graph


@dataclass(frozen=True, eq=False)
class _Generator:
    """An equation that reads no tensor: made again for each of its readers."""

    eqn: Any
    scope: str


_Value = int | Constant | _Generator
_Env = dict[Any, Any]


@dataclass
class _OpenBlock:
    index: int
    parent: int | None
    trip_count: int = 1
    weight: float = 1.0
    conditional: bool = False
    unbounded: bool = False
    inputs: list[int] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)


class _Builder:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.blocks: list[_OpenBlock] = []
        self.num_operators = 0
        self.called_at = ""  # the line of the call that is inlined, if it has one
        self.ordinals: dict[str, int] = {}

    def open_block(
        self, parent: _OpenBlock | None, trips: int | None = 1, *, branch: bool = False
    ) -> _OpenBlock:
        """A block that runs `trips` times (None: unknown) whenever its parent runs."""
        index = len(self.blocks)
        if parent is None:
            block = _OpenBlock(index, None)
        else:
            block = _OpenBlock(
                index,
                parent.index,
                parent.trip_count * (1 if trips is None else trips),
                parent.weight * (ASSUMED_TRIPS if trips is None else trips),
                parent.conditional or branch,
                parent.unbounded or trips is None,
            )
        self.blocks.append(block)
        return block

    def freeze(self, block: _OpenBlock) -> Block:
        own: dict[str, Any] = dict(vars(block))
        for name in ("inputs", "outputs", "operators"):
            own[name] = tuple(own[name])
        return Block(**own)

    def tensor(self, name: str, kind: TensorType, block: _OpenBlock) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, kind, block.index))
        return len(self.tensors) - 1

    def unique_name(self, scope: str, kind: str) -> str:
        stem = f"{scope}/{kind}" if scope else kind
        ordinal = self.ordinals[stem] = self.ordinals.get(stem, -1) + 1
        return f"{stem}.{ordinal}"

    def lookup(self, atom: Any, env: _Env) -> _Value:
        if isinstance(atom, Literal):
            return Constant(literal_value(atom), tensor_type(atom.aval))
        return env[atom]

    def read(self, value: _Value, block: _OpenBlock) -> Operand:
        """The operand a reader gets: a generator is made now."""
        if not isinstance(value, _Generator):
            return value
        eqn = value.eqn
        operands = [self.read(self.lookup(atom, {}), block) for atom in eqn.invars]
        return self.add(eqn.primitive.name, eqn, operands, value.scope, block)[0]

    def add(
        self,
        kind: str,
        eqn: Any,
        operands: Sequence[Operand],
        scope: str,
        block: _OpenBlock,
        bodies: Sequence[int] = (),
        result_types: Sequence[TensorType] | None = None,
    ) -> tuple[int, ...]:
        """Append one operator; the indices of its results."""
        name = self.unique_name(scope, kind)
        if result_types is None:
            result_types = [tensor_type(var.aval) for var in eqn.outvars]
        many = len(result_types) > 1
        results = tuple(
            self.tensor(f"{name}:{i}" if many else name, result_type, block)
            for i, result_type in enumerate(result_types)
        )
        block.operators.append(
            Operator(
                index=self.num_operators,
                name=name,
                kind=kind,
                params=with_scan_counts(eqn.params) if kind == "scan" else eqn.params,
                operands=tuple(operands),
                results=results,
                operand_types=tuple(self.type_of(o) for o in operands),
                result_types=tuple(result_types),
                block=block.index,
                eqn=eqn,
                source=source_line(eqn) or self.called_at,
                bodies=tuple(bodies),
            )
        )
        self.num_operators += 1
        return results

    def type_of(self, operand: Operand) -> TensorType:
        return (
            operand.type
            if isinstance(operand, Constant)
            else self.tensors[operand].type
        )

    def inline(
        self, jaxpr: Any, env: _Env, block: _OpenBlock, scope: str
    ) -> list[_Value]:
        """Add the equations of `jaxpr` to `block`; its outputs."""
        for eqn in jaxpr.eqns:
            inner = "/".join(part for part in (scope, name_scope(eqn)) if part)
            values = [self.lookup(atom, env) for atom in eqn.invars]
            for var, value in zip(
                eqn.outvars, self.equation(eqn, values, block, inner), strict=True
            ):
                if not isinstance(var, DropVar):
                    env[var] = value
        return [self.lookup(atom, env) for atom in jaxpr.outvars]

    def equation(
        self, eqn: Any, values: Sequence[_Value], block: _OpenBlock, scope: str
    ) -> Sequence[_Value]:
        kind = eqn.primitive.name
        if kind in CALLS:
            return self.call(eqn, callee(eqn), values, block, scope)
        if kind not in (SCAN, WHILE, COND):  # their bodies' effects are met in there
            refuse_effects(eqn)
        if all(isinstance(atom, Literal) for atom in eqn.invars) and (
            kind in ("broadcast_in_dim", "iota")
        ):
            return [_Generator(eqn, scope)]
        if kind in (SCAN, WHILE, COND):
            operands = [self.read(value, block) for value in values]
            bodies = self.bodies(eqn, block, scope)
            return self.add(kind, eqn, operands, scope, block, bodies)
        operands = [self.read(value, block) for value in values]
        return self.add(kind, eqn, operands, scope, block)

    def call(
        self,
        eqn: Any,
        callee: Any,
        values: Sequence[_Value],
        block: _OpenBlock,
        scope: str,
    ) -> Sequence[_Value]:
        if eqn.primitive.name in _REMATS and eqn.params.get("prevent_cse"):
            values = self.barrier(eqn, values, block, scope)
        jaxpr, consts = callee, ()
        if hasattr(callee, "jaxpr"):
            jaxpr, consts = callee.jaxpr, callee.consts
        env: _Env = dict(zip(jaxpr.invars, values, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            env[var] = Constant(value, tensor_type(var.aval))
        before, self.called_at = self.called_at, source_line(eqn) or self.called_at
        outputs = self.inline(jaxpr, env, block, scope)
        self.called_at = before
        return outputs

    def barrier(
        self, eqn: Any, values: Sequence[_Value], block: _OpenBlock, scope: str
    ) -> Sequence[_Value]:
        """One barrier over the tensors among `values`: CSE then joins no runs."""
        kept = [i for i, value in enumerate(values) if isinstance(value, int)]
        operands = [value for value in values if isinstance(value, int)]
        types = [self.type_of(operand) for operand in operands]
        if not operands:
            return values
        results = self.add(BARRIER, eqn, operands, scope, block, result_types=types)
        passed = list(values)
        for i, result in zip(kept, results, strict=True):
            passed[i] = result
        return passed

    def bodies(self, eqn: Any, block: _OpenBlock, scope: str) -> list[int]:
        """The blocks of a scan, while or cond."""
        params = eqn.params
        match eqn.primitive.name:
            case "scan":
                trips = params["length"]
                return [self.body(params["jaxpr"], block, trips, f"{scope}/scan")]
            case "while":
                return [
                    self.body(params["cond_jaxpr"], block, None, f"{scope}/while_cond"),
                    self.body(params["body_jaxpr"], block, None, f"{scope}/while"),
                ]
        return [
            self.body(branch, block, 1, f"{scope}/branch{number}", branch=True)
            for number, branch in enumerate(params["branches"])
        ]

    def body(
        self,
        closed: Any,
        parent: _OpenBlock,
        trips: int | None,
        scope: str,
        *,
        branch: bool = False,
    ) -> int:
        """A block with the equations of `closed`."""
        scope = scope.removeprefix("/")
        block = self.open_block(parent, trips, branch=branch)
        env: _Env = {}
        for var in closed.jaxpr.invars:
            name = self.unique_name(scope, "input")
            env[var] = self.tensor(name, tensor_type(var.aval), block)
            block.inputs.append(env[var])
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[var] = Constant(value, tensor_type(var.aval))
        outputs = self.inline(closed.jaxpr, env, block, scope)
        block.outputs = [self.read(value, block) for value in outputs]
        return block.index
